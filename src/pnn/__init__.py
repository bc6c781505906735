"""Plastic Neural Networks: transformers that rewrite instead of only adding.

`import pnn` loads torch and transformers and tells the Auto classes of our models. The command `pnn` passes through here too,
but answers `--help` or a typo at once: each of its commands loads what it needs (`pnn/cli`).
"""

import itertools
import os
import signal
import sys

# A thread of torch that waits for another keeps its core busy. Where other programs want that core too, the default of 300,000
# rounds makes small models ten times slower. Read when torch is loaded, so it stands before all imports; your own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process was started as `pnn …` or as `python -m pnn …`. While Python looks for a module, argv[0] is -m."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return program in ("pnn", "pnn.exe") or (program == "-m" and ("-m", "pnn") in itertools.pairwise(sys.orig_argv))


if _is_the_command():
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python still imports: no traceback. `cli.main` undoes it
else:
    from pnn import models, plasticity
    from pnn.models import *  # noqa: F403

    __all__ = [*models.__all__, "plasticity"]
