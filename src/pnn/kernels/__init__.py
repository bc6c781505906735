"""Fast versions of single operations, in Triton. Each has its plain twin in `nn/` or `objectives`, which decides when it runs.

A file here imports nothing of ours, and its `takes` says what it computes. Triton comes with CUDA builds of torch; without
it nothing here is taken. `TRITON_INTERPRET=1`, set before Triton is imported, runs the kernels on a CPU for their tests.
"""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
