"""Out of memory, on a GPU or on the host: one sentence that says what to change."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pnn.errors import UserError

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


def give_back_freed_memory() -> None:
    """Let the C library hand large freed arrays back to the system at once. By default glibc keeps those of up to 32 MiB for
    itself, and batches of ever new sizes fit badly into what it keeps: a process that holds 2 GB then grows to 9."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 4 << 20)


M_MMAP_THRESHOLD = -3  # glibc's malloc.h
