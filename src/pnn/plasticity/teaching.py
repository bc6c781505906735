"""Learning with a teacher: the smaller model learns to predict what the unpruned one predicts, not the text alone.

    L = 1/N Σ_n KL(p_n ‖ q_n),   p = softmax(teacher's logits), q = softmax(the model's)        at the N predicted positions
    `states` adds  Σ_n ‖h_n − t_n‖² / Σ_n ‖t_n‖²                                               of what both heads read

A token of text says which word came; the teacher's distribution says how likely every word was. Its temperature is 1. Of a PNN
the last step is taught.

Where the text has pieces of a token that went (`vocabulary`), a teacher who never wrote it so is not asked: there p_n is 1 for
what the text has, and the row's loss −log q_n of it. In expectation that is the teacher's distribution over all tokens, with
what it gives those that went moved to their first pieces.

The logits of a batch are many times its states, and the divergence needs two sets of them. So rows are taken in chunks: for
each the logits of both are computed, the divergence, and at once the gradients of the states, the vocabulary matrix and its
bias, which are kept in the logits' stead. The backward pass multiplies them by the incoming gradient. The products are those of
the plain form; `plain_divergence` is that form, and the tests hold the two against each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError, did_you_mean
from pnn.memory import check_fits
from pnn.models.recorded import without_asking
from pnn.models.registry import kind_of
from pnn.nn.fast import computed_in, for_kernels
from pnn.objectives import IGNORE
from pnn.plasticity.text import NOT_TOLD

LESSONS = ("logits", "states")  # what is learnt of a teacher
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # of one model's logits in fp32
TINY = torch.finfo(torch.float32).tiny
LEARNS = 4  # a model that learns holds its weights, their gradients and two averages of these


class Teacher:
    """The model as it was, without gradients. It computes in the precision of the model that learns."""

    def __init__(self, model: PreTrainedModel, lesson: str = "logits"):
        if lesson not in LESSONS:
            raise UserError(f"there is no {lesson!r} to learn from a teacher{did_you_mean(lesson, LESSONS)}")
        self.model, self.lesson = model.eval(), lesson

    def loss(self, student: PreTrainedModel, batch: dict[str, Any], whole_rows: bool = False) -> Tensor:
        """How far the student's predictions are from the teacher's, over the batch's targets; from the text, where `told` has
        a label (`Text.for_update`)."""
        inputs = {name: value for name, value in batch.items() if name != "told"}
        told = told_targets(batch["told"]) if "told" in batch else None
        with torch.no_grad():
            wanted = states_before_head(self.model, inputs, whole_rows)
        h = states_before_head(student, inputs, whole_rows)
        if len(h) == 0:
            return h.sum()
        loss = divergence(h, _head(student), wanted, _head(self.model), told)
        if self.lesson == "states":
            asked = 1.0 if told is None else (told == NOT_TOLD)[:, None].float()
            size = (asked * wanted.float().square()).sum()  # none where all is told
            loss = loss + (asked * (h.float() - wanted.float()).square()).sum() / size.clamp(min=TINY)
        return loss


def check_room(model: PreTrainedModel, smallest: float) -> None:
    """Refuse a teacher that cannot lie in memory beside a model that learns. `smallest`: the least share of the teacher's
    weights that the other will have."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    check_fits(
        lambda: model,
        "a teacher beside the model that learns",
        str(model.device),
        besides=int(LEARNS * smallest * weights),
        instead=lambda _: "take a smaller model, or learn without a teacher (--teacher none)",
    )


def states_before_head(model: PreTrainedModel, batch: dict[str, Any], whole_rows: bool = False) -> Tensor:
    """What the vocabulary matrix reads at the predicted positions, (targets, d). `whole_rows`: the caller knows that a decoder
    of transformers shall predict every token but the first of each row; then nothing is asked of the device, and the pass can
    be recorded."""
    inputs, kind = dict(batch), kind_of(model)
    labels = inputs.pop("labels")
    if whole_rows:
        return _read_by_head(model, inputs | without_asking(model.config))[:, :-1].flatten(0, 1)
    if kind.causal:  # each token predicts the next
        labels = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), IGNORE)), dim=1)
    at = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    if kind.ours and not kind.causal:
        inputs["logit_positions"] = at  # ours compute nothing else of the last step
    h = _read_by_head(model, inputs).flatten(0, -2)
    return h if "logit_positions" in inputs else h[at]


def _read_by_head(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """No logits are computed: the head is handed no rows at all."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        seen.append(args[0])
        return args[0][..., :0, :]

    hook = _head(model).register_forward_pre_hook(stop)
    try:
        model(**inputs)
    finally:
        hook.remove()
    return seen[0]


def told_targets(told: Tensor) -> Tensor:
    """For each of `states_before_head` what the text tells of the next token. Only rows of running text lose tokens, and all of
    their tokens are labels: nothing has to be looked for on the device."""
    return told[:, 1:].flatten()


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def plain_divergence(logits: Tensor, wanted: Tensor, told: Tensor | None = None) -> Tensor:
    """1/N Σ KL(softmax(wanted) ‖ softmax(logits)) of all rows at once; −log softmax(logits) of the label in rows that have one
    in `told`, which is NOT_TOLD elsewhere."""
    log_q, log_p = _log_softmax(logits), _log_softmax(wanted)
    if told is None:
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True) / len(logits)
    asked = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    text = F.nll_loss(log_q, told, ignore_index=NOT_TOLD, reduction="none")
    return torch.where(told == NOT_TOLD, asked, text).mean()


def divergence(h: Tensor, head: nn.Linear, wanted: Tensor, wanted_head: nn.Linear, told: Tensor | None = None) -> Tensor:
    """The same from states (N, d) and vocabulary matrices, the logits of a chunk of rows at a time."""
    matrices = (h, head.weight, head.bias, wanted, wanted_head.weight, wanted_head.bias)
    if for_kernels(h):
        from pnn.kernels.divergence import linear_divergence

        return linear_divergence(*matrices, computed_in(h), told)
    return _Divergence.apply(*matrices, told)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor,
        wanted_weight: Tensor,
        wanted_bias: Tensor | None,
        told: Tensor | None,
    ) -> Tensor:
        product = computed_in(h)
        rows = max(1, CHUNK_BYTES.get(h.device.type, CHUNK_BYTES["cpu"]) // (4 * len(weight)))
        matrix, teaching = weight.to(product), wanted_weight.to(product)
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        slopes: list[Tensor] = []
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = None if bias is None else torch.zeros_like(bias)
        labels = iter(() if told is None else told.split(rows))
        for part, target in zip(h.to(product).split(rows), wanted.to(product).split(rows), strict=True):
            log_q = _log_softmax(part @ matrix.T, bias)
            log_p = _log_softmax(target @ teaching.T, wanted_bias)
            p = log_p.exp()
            if (label := next(labels, None)) is not None:
                tells = (label != NOT_TOLD)[:, None]
                p = torch.where(tells, torch.zeros_like(p).scatter_(1, label.clamp(min=0)[:, None], 1.0), p)
                log_p = log_p.masked_fill_(tells, 0.0)  # of the label; of others it is multiplied by zero
            total += log_p.sub_(log_q).mul_(p).sum(dtype=torch.float64)
            slope = log_q.exp_().sub_(p).div_(len(h))  # ∂L/∂logits
            if of_bias is not None:
                of_bias += slope.sum(0)
            slope = slope.to(product)
            slopes.append(slope @ matrix)
            if of_weight is not None:
                of_weight += slope.T @ part
        ctx.save_for_backward(torch.cat(slopes).to(h.dtype), of_weight, of_bias)
        return (total / len(h)).to(h.dtype if h.dtype == torch.float64 else torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if one is None else grad.to(one.dtype) * one for one in ctx.saved_tensors), *[None] * 4)


def _log_softmax(logits: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(logits if bias is None else logits + bias, -1)
