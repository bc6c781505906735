"""A PNN's loss is a weighted sum over its steps, which no other model's loss compares with. Its last step's does."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.utils import ModelOutput


class LastLoss(TrainerCallback):
    """`Trainer(…, callbacks=[pnn.LastLoss()])` evaluates by the last step: `eval_loss` is `last_loss`, the loss of what the
    model predicts in the end. Training goes by the weighted sum as before."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any) -> None:
        assert model is not None
        model.register_forward_hook(_report_last)


def _report_last(model: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, ModelOutput) and not model.training and output.get("last_loss") is not None:
        output["loss"] = output["last_loss"]
