"""What a benchmark measures with: a clock that waits for the device only around blocks of updates, the rate of a large matrix
product on the same machine, peak memory, and what the machine is."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState

from pnn.training.tracking import environment
from pnn.turns import synchronize

CALIBRATION = 2  # updates that say how many make a block
GPU_PRODUCT, CPU_PRODUCT = 8192, 1024  # sides of the square matrices whose product is the yardstick
COPIED = 1 << 30  # bytes of the copy that is the other one: far more than any cache holds


@dataclass(frozen=True)
class Budget:
    """How long to time one row."""

    seconds: float = 10.0  # timed, over all blocks
    blocks: int = 7
    warmup: int = 6  # updates before the clock: compilation, caches, the allocator


SUSTAINED = Budget(seconds=1.0, blocks=5, warmup=5)  # of products without a pause


class Clock:
    """Call `tick` after every update has been launched; it says when enough has been timed. Updates in a block follow each
    other as in training: the device is waited for at the block's ends only."""

    def __init__(self, budget: Budget, device: torch.device, agree: Callable[[float], float] = lambda seconds: seconds):
        """`agree` makes all processes of a run see one time, so that their blocks are equally long."""
        self.budget, self.device, self.agree = budget, device, agree
        self.blocks: list[tuple[float, float]] = []  # (real tokens, seconds) of each
        self.updates_per_block = 0
        self._warm = False
        self._start(budget.warmup)

    def _start(self, updates: int) -> None:
        self._wanted, self._updates, self._tokens = updates, 0, 0.0
        synchronize(self.device)
        self._started = time.perf_counter()

    def tick(self, tokens: float) -> bool:
        """One more update, of so many real tokens. True once all blocks are timed."""
        self._updates += 1
        self._tokens += tokens
        if self._updates < self._wanted:
            return False
        synchronize(self.device)
        seconds = time.perf_counter() - self._started
        if not self._warm:
            self._warm = True
            self._start(CALIBRATION)
        elif not self.updates_per_block:
            one = self.agree(seconds) / CALIBRATION
            self.updates_per_block = max(1, round(self.budget.seconds / self.budget.blocks / one))
            self._start(self.updates_per_block)
        else:
            self.blocks.append((self._tokens, seconds))
            self._start(self.updates_per_block)
        return len(self.blocks) == self.budget.blocks

    def result(self) -> dict[str, Any]:
        """The median over blocks, the slowest and the fastest."""
        speeds = [tokens / seconds for tokens, seconds in self.blocks]
        updates = [1000 * seconds / self.updates_per_block for _, seconds in self.blocks]
        return {
            "tokens_per_second": {"median": statistics.median(speeds), "low": min(speeds), "high": max(speeds)},
            "milliseconds_per_update": statistics.median(updates),
            "blocks": len(self.blocks),
            "updates_per_block": self.updates_per_block,
        }


def time_updates(
    update: Callable[[], float], budget: Budget, device: torch.device, agree: Callable[[float], float] = lambda seconds: seconds
) -> dict[str, Any]:
    """Time `update`, which launches one update and returns its number of real tokens."""
    clock = Clock(budget, device, agree)
    while not clock.tick(update()):
        pass
    return clock.result()


# Memory -----------------------------------------------------------------------------------------------------------


def clean_slate(device: torch.device) -> None:
    """Before a row: nothing left of the row before it in memory, in the compiler's caches, or in accelerate's idea of which
    device to use."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes that tensors took at most since the clean slate. Not known on a CPU, where one process times all rows."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# The machine ------------------------------------------------------------------------------------------------------


def matrix_rate(device: torch.device) -> dict[str, Any]:
    """FLOP/s of a large square product: what share of it training reaches is how well it uses the machine. Blocks of ten
    products, each after a rest: a GPU that multiplies without a pause grows hot and slow, and a share of that lower rate would
    flatter us. The lower rate stands beside it."""
    on_gpu = device.type == "cuda"
    side, dtype, name = (GPU_PRODUCT, torch.bfloat16, "bf16") if on_gpu else (CPU_PRODUCT, torch.float32, "fp32")
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)

    def product() -> float:
        torch.mm(left, right, out=out)
        return 2.0 * side**3

    rested = []
    for _ in range(7):
        time.sleep(0.3 if on_gpu else 0.0)
        for _ in range(3):
            product()
        synchronize(device)
        started = time.perf_counter()
        done = sum(product() for _ in range(10))
        synchronize(device)
        rested.append(done / (time.perf_counter() - started))
    sustained = time_updates(product, SUSTAINED, device)["tokens_per_second"]
    return {
        "product": f"{side}³ {name}",
        "flops_per_second": {"median": statistics.median(rested), "low": min(rested), "high": max(rested)},
        "sustained_flops_per_second": sustained["median"],
    }


def copy_rate(device: torch.device) -> dict[str, Any]:
    """Bytes a second, read and written, of a long copy: what a pass that only moves its numbers can reach."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> float:
        target.copy_(source)
        return 2.0 * COPIED

    measured = time_updates(copy, Budget(seconds=0.5, blocks=5, warmup=5), device)["tokens_per_second"]
    return {"copied_bytes": COPIED, "bytes_per_second": measured}


def machine() -> dict[str, Any]:
    """`hardware`, `versions`, `git` and `source_sha256`, as a run's environment.json has them."""
    known = environment(seed=0, processes=1)
    return {key: known[key] for key in ("hardware", "versions", "git", "source_sha256")}


def hardware_slug(hardware: dict[str, Any]) -> str:
    """For file names: nvidia-h200, cpu-2-cores."""
    name = hardware["gpus"][0] if hardware["gpus"] else f"cpu {hardware['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
