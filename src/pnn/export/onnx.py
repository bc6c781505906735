"""ONNX: the model as a graph with a fixed number of refinement steps, for any batch and length.

Inputs `input_ids` and `attention_mask` (int64, batch × length; for a multiple-choice model batch × choices × length), output
`logits` (for question answering the start and end scores, batch × length × 2). A decoder's graph has no cache: it scores whole
texts. The graph is run in onnxruntime before it is kept, on another batch and length than it was traced with, and must agree
with torch to 1e-4.

For CPUs a second graph can be made of it, in int8: both sides of a product with a weight matrix become whole numbers,
x ≈ s (q − z), with one scale per column of the matrix and one per call for the states. Attention, norms and embeddings stay in
fp32. No such graph agrees to 1e-4; how far its logits are off is told as a share of their spread.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.models.registry import kind_of

TOLERANCE = 1e-4
INT8_TOLERANCE = 0.2  # of the logits' spread
NEEDED = "--onnx needs three more packages: pip install onnx onnxscript onnxruntime"


class _Logits(nn.Module):
    def __init__(self, model: PreTrainedModel, options: dict[str, Any]):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options)
        return out.logits if "logits" in out else torch.stack((out.start_logits, out.end_logits), dim=-1)


def check_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(NEEDED) from None


def write_onnx(path: Path, model: PreTrainedModel, steps: int | None) -> float:
    """Returns the largest difference to torch's logits."""
    check_installed()
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()  # what onnxruntime computes in on a CPU; the folder's own weights stay as they are
    model = model.eval()
    options: dict[str, Any] = {"num_steps": steps} if steps is not None else {}
    if kind_of(model).causal:
        options["use_cache"] = False
    if kind_of(model).has_steps and not kind_of(model).causal:
        options["halt"] = False  # a graph computes every token at every step
    wrapped = _Logits(model, options)
    sizes: dict[int, Any] = {0: "batch", 2 if _chooses(model) else 1: "length"}
    with _quiet():
        torch.onnx.export(
            wrapped,
            _example(model, 2, 12),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
            dynamo=True,
            external_data=False,
            optimize=False,  # it takes adding 1e-10 for adding nothing, and directions of length 0 become NaN
        )
    _leave_out_traces(path)
    difference = 0.0
    for inputs in _trials(model):
        with torch.no_grad():
            ours = wrapped(*inputs).numpy()
        difference = max(difference, float(np.abs(_unpadded(ours - _run(path, inputs), inputs)).max()))
    if not difference <= TOLERANCE:
        fewer = "try fewer --num-steps, or " if steps is not None else ""
        raise UserError(
            f"the ONNX graph differs from torch by {difference:g}, more than {TOLERANCE:g}, and is not kept: "
            f"{fewer}export without --onnx"
        )
    return difference


def write_int8(path: Path, graph: Path, model: PreTrainedModel) -> float:
    """The `graph` that `write_onnx` made of `model`, with products in int8. Returns the root mean square of what changes in its
    logits, as a share of their standard deviation."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, _quiet():
        folded = Path(folder) / "folded.onnx"  # matrices are turned around first, and only constants become int8
        quant_pre_process(graph, folded, skip_onnx_shape=True, skip_symbolic_shape=True)
        quantize_dynamic(
            folded,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    pairs = [tuple(_unpadded(_run(one, inputs), inputs).reshape(-1) for one in (graph, path)) for inputs in _trials(model)]
    exact, rounded = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    off = float(np.sqrt(np.square(rounded - exact).mean()) / exact.std())
    if not off <= INT8_TOLERANCE:
        raise UserError(
            f"in int8 the logits are off by {off:.0%} of their spread, more than {INT8_TOLERANCE:.0%}, and the graph is not "
            "kept: export without --int8"
        )
    return off


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters talk."""
    heard, loggers = io.StringIO(), [logging.getLogger(name) for name in ("torch.onnx", None)]
    levels = [logger.level for logger in loggers]
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _leave_out_traces(path: Path) -> None:
    """Of the Python lines that each node came from: megabytes, with this machine's paths in them."""
    import onnx

    graph = onnx.load(path)
    for part in (graph.graph, *graph.functions):
        del part.metadata_props[:]
        for node in part.node:
            del node.metadata_props[:]
            node.doc_string = ""
    for value in (*graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        del value.metadata_props[:]
    onnx.save(graph, path)


def _chooses(model: PreTrainedModel) -> bool:
    return "MultipleChoice" in type(model).__name__


def _example(model: PreTrainedModel, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens at random, the last row with padding at its end."""
    length = min(length, getattr(model.config, "max_position_embeddings", None) or 512)
    shape = (batch, 2, length) if _chooses(model) else (batch, length)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    if getattr(model.config, "guess_after", None):  # what reads its guess has to be there
        ids[..., ::3] = model.config.mask_token_id
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., length - length // 3 :] = 0
    return ids, mask


def _trials(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """What graphs are compared on: other batches and lengths than they are traced with."""
    return [_example(model, 3, length) for length in (7, 20)]


def _run(path: Path, inputs: tuple[Tensor, Tensor]) -> NDArray[np.float32]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = dict(zip(("input_ids", "attention_mask"), (x.numpy() for x in inputs), strict=True))
    logits: NDArray[np.float32] = session.run(["logits"], feed)[0]
    return logits


def _unpadded(logits: NDArray[np.float32], inputs: tuple[Tensor, Tensor]) -> NDArray[np.float32]:
    """Where there is a vector for every token, what stands at padding means nothing."""
    return logits[inputs[1].numpy().astype(bool)] if logits.ndim == 3 else logits
