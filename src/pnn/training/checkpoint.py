"""Checkpoints: a model folder anyone can load, plus what an exact resume needs. No pickle anywhere.

    checkpoints/step-000500/  config.json model.safetensors tokenizer.json …
                              optimizer.safetensors trainer_state.json checksums.json
    checkpoints/last → step-000500     checkpoints/best → step-000250

A checkpoint is written beside its place and renamed, so it is whole or not there; `best` and `last` are links, replaced in one
step. Every file has a checksum, compared before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.errors import UserError
from pnn.files import new_folder, remove_folder, write_checksums, write_json
from pnn.models.loading import check_finite, save_tokenizer
from pnn.runs import read_json, verify_checkpoint
from pnn.training.optim import with_average

# Of trainer_state.json: what is read of it
STATE: dict[str, Any] = {
    "step": int,
    "stream_position": int,
    "best_loss": int | float | None,
    "best_step": int,
    "seconds": int | float,
    "text": list,
    "scaler": dict | None,
}


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    with _new_checkpoint(folder, model, tokenizer) as partial:
        save_file(optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
        write_json(partial / "trainer_state.json", state)


def save_average(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.Optimizer
) -> None:
    """A checkpoint of the averaged weights. Nothing resumes from it: they are kept with the optimiser's state."""
    with with_average(optimizer), _new_checkpoint(folder, model, tokenizer):
        pass


@contextmanager
def _new_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Iterator[Path]:
    """A folder with a model, to add to; checksums come last."""
    try:
        with new_folder(folder) as partial:
            model.save_pretrained(partial)
            save_tokenizer(tokenizer, model, partial)
            yield partial
            write_checksums(partial)
    except (OSError, SafetensorError) as error:
        raise UserError(f"could not write the checkpoint {folder}: {error} (earlier checkpoints are untouched)") from error


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state by parameter name: `exp_avg.encoder.…`."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{kind}.{names[parameter]}": value.contiguous()
        for parameter, entries in optimizer.state.items()
        for kind, value in entries.items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tensors = read_tensors(folder / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        entries = {key.partition(".")[0]: value for key, value in tensors.items() if key.partition(".")[2] == name}
        if entries:
            optimizer.state[parameter] = {
                # Adam's step count stays a 32-bit number on the parameter's device, as the fused optimiser keeps it
                kind: value.to(parameter.device)
                for kind, value in entries.items()
            }


def load_weights(model: nn.Module, folder: Path) -> None:
    tensors = read_tensors(folder / "model.safetensors")
    check_finite(folder, tensors.items())
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if set(missing) - tied or unexpected:
        wrong = sorted({*(set(missing) - tied), *unexpected})
        raise UserError(f"{folder} holds a model of another architecture ({len(wrong)} weights differ, first {wrong[0]})")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged or missing ({error})") from None


def read_state(folder: Path) -> dict[str, Any]:
    verify_checkpoint(folder)
    state = read_json(folder / "trainer_state.json")
    if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in STATE.items()):
        raise UserError(f"{folder / 'trainer_state.json'} is damaged: it does not say how far the run came")
    return state


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def rotate(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and those that best and last point to."""
    pointed = {(checkpoints / name).resolve() for name in ("best", "last")}
    ours = [path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal()]  # not a user's copies
    for folder in sorted(ours, key=lambda path: int(path.name.removeprefix("step-")))[:-keep]:
        if folder.resolve() not in pointed:
            remove_folder(folder)
