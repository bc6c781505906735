"""ONNX: the model as a graph with a fixed number of refinement steps, for any batch and length.

Inputs `input_ids` and `attention_mask` (int64, batch × length; for a multiple-choice model batch × choices × length), output
`logits` (for question answering the start and end scores, batch × length × 2). A decoder's graph has no cache: it scores whole
texts. The graph is run in onnxruntime before it is kept, on another batch and length than it was traced with, and must agree
with torch to 1e-4.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.models.registry import kind_of

TOLERANCE = 1e-4
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
    if kind_of(model).has_steps:
        options["halt"] = False  # a graph computes every token at every step
    wrapped = _Logits(model, options)
    choices = "MultipleChoice" in type(model).__name__
    longest = getattr(model.config, "max_position_embeddings", None) or 512
    sizes: dict[int, Any] = {0: "batch", 2 if choices else 1: "length"}
    quiet = io.StringIO()  # the exporter talks
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            wrapped,
            _example(model, choices, 2, min(12, longest)),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
            dynamo=True,
            external_data=False,
            optimize=False,  # it takes adding 1e-10 for adding nothing, and directions of length 0 become NaN
        )
    _leave_out_traces(path)
    return max(_difference(path, wrapped, _example(model, choices, 3, min(length, longest))) for length in (7, 20))


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


def _example(model: PreTrainedModel, choices: bool, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens at random, the last row with padding at its end."""
    shape = (batch, 2, length) if choices else (batch, length)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, ..., length - length // 3 :] = 0
    return ids, mask


@torch.no_grad()
def _difference(path: Path, wrapped: _Logits, inputs: tuple[Tensor, Tensor]) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = dict(zip(("input_ids", "attention_mask"), (x.numpy() for x in inputs), strict=True))
    (theirs,) = session.run(["logits"], feed)
    ours, keep = wrapped(*inputs).numpy(), inputs[1].numpy().astype(bool)
    if ours.ndim == 3:  # a vector for every token: what stands at padding means nothing
        ours, theirs = ours[keep], theirs[keep]
    difference = float(np.abs(ours - theirs).max())
    if not difference <= TOLERANCE:
        fewer = "try fewer --num-steps, or " if "num_steps" in wrapped.options else ""
        raise UserError(
            f"the ONNX graph differs from torch by {difference:g}, more than {TOLERANCE:g}, and is not kept: "
            f"{fewer}export without --onnx"
        )
    return difference
