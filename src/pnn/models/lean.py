"""Training a decoder of transformers without its logits, and measuring it with logits that come fast.

transformers' own loss holds the logits of a whole batch three times in fp32, and multiplies with a vocabulary matrix whose rows
(50,257 in GPT-2) matrix units read at a fraction of their speed. Our loss takes the last state and the head instead
(`objectives.next_token_loss`), by a kernel where there is one. Where logits are wanted, `with padded_vocabulary(model):` gives
the matrix rows that matrix units like.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from pnn.nn.fast import padded
from pnn.objectives import next_token_loss


def leave_out_logits(model: PreTrainedModel) -> None:
    """From now on, a call with `labels` gives a loss and no logits; without them everything is as it was. Nothing happens to a
    model whose logits are not its head applied to its last state (some are scaled or capped)."""
    if not _is_head_of_last_state(model):
        return

    @functools.wraps(type(model).forward)  # generate() reads its signature
    def forward(self: PreTrainedModel, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        if labels is None:
            return type(self).forward(self, *args, **inputs)
        targets = inputs.pop("num_items_in_batch", None)
        h = self.base_model(*args, **inputs).last_hidden_state
        return CausalLMOutput(loss=next_token_loss(h, self.get_output_embeddings(), labels, targets))

    model.forward = MethodType(forward, model)  # a method, so that a copy of the model calls itself and not this one


def with_logits_again(model: PreTrainedModel) -> None:
    model.__dict__.pop("forward", None)


@contextmanager
def padded_vocabulary(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile logits may have more columns than the vocabulary has words: whoever reads them cuts them off."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.device.type != "cuda" or len(head.weight) % 8 == 0:
        yield
        return
    # the head's own matrix is exchanged, not the head: `set_output_embeddings` ties what a model may hold apart (BERT's biases)
    weight, bias = head.weight, head.bias
    with torch.no_grad():
        head.weight, head.bias = (
            None if rows is None else nn.Parameter(padded(rows, rows.dtype), requires_grad=False) for rows in (weight, bias)
        )
    try:
        yield
    finally:
        head.weight, head.bias = weight, bias


@torch.no_grad()
def _is_head_of_last_state(model: PreTrainedModel) -> bool:
    head, training = model.get_output_embeddings(), model.training
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    model.eval()
    try:
        ids = torch.arange(2, device=model.device)[None]
        logits = model(input_ids=ids, use_cache=False).logits
        found = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    finally:
        model.train(training)
    return torch.allclose(logits.float(), found.float(), atol=1e-5, rtol=1e-4)
