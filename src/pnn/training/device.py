"""What this machine can train on and in which precision, decided before anything is written.

    no GPU                        bf16 on a CPU with instructions for it, if states are wide enough for that to be faster
                                  (`models/precision`), else fp32; `training.device: cuda` is refused
    a GPU without bf16            fp16 with a loss scale; `training.precision: bf16` is refused: it would be emulated, slowly
    older than any kernel knows   plain steps (`nn/fast.for_kernels`); without Triton nothing is compiled either

What runs on an old GPU is slower there and rounds elsewhere; the equations are the same.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pnn import kernels
from pnn.config import RunConfig, TrainingConfig
from pnn.errors import UserError
from pnn.models.precision import gpu_has_bf16, learns_in, width_of
from pnn.models.sections import model_config
from pnn.runs import read_environment

TRITON_KNOWS = (7, 0)  # the oldest compute capability that torch.compile takes


def precision_of(config: RunConfig, before: str | None = None) -> tuple[str, bool]:
    """(accelerate's mixed precision, whether to train on a GPU) for this machine. `before`: what the run that goes on has been
    trained in so far, which a CPU keeps to."""
    training = config.training
    on_gpu = torch.cuda.is_available() and training.device != "cpu"
    if training.device == "cuda" and not on_gpu:
        raise UserError("training.device: cuda, but this machine has no GPU that torch can use")
    if on_gpu:
        check_own_gpu()
    has_bf16 = on_gpu and gpu_has_bf16("cuda")
    precision = training.precision
    if precision == "auto":
        if on_gpu:
            precision = "bf16" if has_bf16 else "fp16"
        else:
            chosen = learns_in("cpu", width_of(model_config(config.model)))
            precision = before or ("bf16" if chosen == torch.bfloat16 else "fp32")
    if precision == "fp16" and not on_gpu:
        raise UserError("training.precision: fp16 needs a GPU (use bf16 or fp32 on a CPU)")
    if precision == "bf16" and on_gpu and not has_bf16:
        name = torch.cuda.get_device_name()
        raise UserError(f"training.precision: bf16, but {name} cannot compute in it: use fp16, which auto would choose")
    return ("no" if precision == "fp32" else precision), on_gpu


def trained_in(run: Path) -> str | None:
    """What a run on a machine without a GPU has been trained in so far; fp32 where it does not say so, as older ones."""
    if not (run / "environment.json").exists():
        return None
    made = read_environment(run)
    return None if made["hardware"]["gpus"] else made.get("precision", "fp32")


def check_own_gpu() -> None:
    """Every process of a node needs a GPU of its own."""
    index, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= gpus:
        raise UserError(
            f"process {index + 1} on this machine has no GPU of its own: there are {gpus}, so start at most {gpus} processes "
            "(or train on the CPU: training.device=cpu)"
        )


def compiles(training: TrainingConfig, on_gpu: bool) -> bool:
    """Whether to use torch.compile: as the config says, else on a GPU that its compiler knows."""
    known = on_gpu and kernels.HAS_TRITON and torch.cuda.get_device_capability() >= TRITON_KNOWS
    if training.compile and on_gpu and not known:
        missing = "Triton does not know this GPU" if kernels.HAS_TRITON else "Triton is not installed"
        raise UserError(f"training.compile: true, but {missing}: leave it at null")
    return known if training.compile is None else training.compile
