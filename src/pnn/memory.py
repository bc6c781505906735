"""Out of memory, on a GPU or on the host: one sentence that says what to change, before anything is allocated if it can be
known: sizes in configs and model folders are compared with what the machine has."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pnn.errors import UserError, first_line

# What a model has one of for each: sizes of which every one costs time and memory, however small
COUNTS = (
    "num_steps",
    "trained_steps",
    "num_rounds",
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_labels",
    "num_experts",
    "num_local_experts",
)
MOST = 10_000
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# What torch says without a type of its own: the host's allocator, the CUDA runtime, cuBLAS
MESSAGES = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what failed first: an error inside a CUDA graph or the compiler comes wrapped in another one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(cause, RuntimeError) and any(message in str(cause) for message in MESSAGES):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def out_of_memory_says(advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory inside the block into a `UserError`. `advice` is asked only then."""
    try:
        yield
    except UserError:
        raise  # said already, nearer to the cause
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory {advice()}") from error


def check_counts(values: Any, where: str) -> None:
    """Refuse numbers of layers or steps that no model has, in what a YAML or JSON file says, and inside."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if key in COUNTS and isinstance(value, int) and value > MOST:
            raise UserError(f"{where}: {key} is {value:,}, but at most {MOST:,} are allowed")
        check_counts(value, where)


def bytes_of_weights(make: Callable[[], nn.Module]) -> int:
    """Of a model that is made without memory."""
    with torch.device("meta"):
        return sum(one.numel() * one.element_size() for one in make().parameters())


def check_fits(
    make: Callable[[], nn.Module],
    where: str,
    device: str = "cpu",
    copies: int = 1,
    besides: int = 0,
    instead: Callable[[int], str] = lambda _: "take a smaller model or batch",
) -> None:
    """Refuse a model that cannot fit: so many `copies` of its weights, and bytes `besides`. `instead` says what does fit into
    as many bytes as there are."""
    try:
        weights = bytes_of_weights(make)
    except RuntimeError as error:  # sizes beyond what torch can count
        raise UserError(f"{where}: {first_line(error)}") from error
    needed, has = copies * weights + besides, _total(device)
    if needed > has:
        sizes = f"at least {needed / 1e9:,.1f} GB ({weights / 1e9:,.1f} GB of weights), but {device} has {has / 1e9:,.1f} GB"
        raise UserError(f"{where}: out of memory before anything is computed: it needs {sizes}: {instead(has)}")


def _total(device: str) -> int:
    """Bytes of memory, used or not; of the host as much as this process may have."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [file.read_text(encoding="utf-8").strip() for file in CGROUP if file.exists()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def give_back_freed_memory() -> None:
    """Let the C library hand large freed arrays back to the system at once. By default glibc keeps those of up to 32 MiB for
    itself, and batches of ever new sizes fit badly into what it keeps: a process that holds 2 GB then grows to 9."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 4 << 20)


M_MMAP_THRESHOLD = -3  # glibc's malloc.h
