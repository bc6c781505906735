"""What an update is, and its batches, assembled ahead.

An update is `effective_batch_size` sequences' worth of tokens: `accumulation` micro-batches on each process, every micro-batch
a fixed number of tokens. All processes read one stream and each takes its turn, so the data of an update, its masks and its
loss (a sum over all targets divided by their number) do not depend on how many processes share the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pnn.config import RunConfig
from pnn.data.batches import PackedBatch, TrainingStream
from pnn.data.shards import Prepared
from pnn.errors import UserError


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run: what an update is and how many there are."""

    batch_tokens: int  # tokens of a micro-batch
    accumulation: int  # micro-batches of an update on each process
    updates: int

    @staticmethod
    def of(config: RunConfig, prepared: Prepared, processes: int) -> Plan:
        training = config.training
        share, rest = divmod(training.effective_batch_size, training.batch_size * processes)
        if rest or share == 0:
            fitting = fitting_batch_size(training.effective_batch_size, processes, training.batch_size)
            raise UserError(
                f"training.effective_batch_size {training.effective_batch_size} is not a multiple of batch_size "
                f"{training.batch_size} × {processes} processes: "
                + (f"--batch-size {fitting} fits" if fitting else f"choose one that {processes} divides")
            )
        lengths = prepared.train.lengths[prepared.train_sequences]
        # Sequences are counted at their mean length, so an update holds as many as the paper's on average. Large batches
        # are rounded to what a GPU's matrix units like.
        wanted = training.batch_size * float(lengths.mean())
        multiple = 64 if wanted > 4096 else 8
        if config.kind.causal:
            multiple = int(lengths.max())  # whole rows
        elif wanted <= 4096:
            wanted += float(lengths.mean()) / 2  # a batch ends with half a sequence that does not fit; small ones feel it
        batch_tokens = max(round(wanted / multiple) * multiple, int(lengths.max()))
        updates = training.max_steps
        if updates is None:
            updates = max(1, math.ceil(training.epochs * len(lengths) / training.effective_batch_size))
        return Plan(batch_tokens, share, updates)


def fitting_batch_size(effective: int, processes: int, most: int) -> int | None:
    """The largest micro-batch of at most `most` sequences that the processes can share an update in, if there is one."""
    share, rest = divmod(effective, processes)
    return None if rest else next((size for size in range(min(most, share), 0, -1) if share % size == 0), None)


@dataclass(frozen=True)
class Update:
    batches: list[PackedBatch]
    position: int  # of the stream, once this update is done
    tokens: int  # real tokens of the update, over all processes


def updates_ahead(stream: TrainingStream, plan: Plan, rank: int, processes: int, count: int) -> Iterator[Update]:
    """This process's share of each update, assembled one update ahead on a thread."""

    def assemble() -> Update:
        batches, before = [], stream.tokens_taken
        for turn in range(plan.accumulation * processes):
            if turn % processes == rank:
                batches.append(next(stream))
            else:
                stream.skip()
        return Update(batches, stream.position, stream.tokens_taken - before)

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(assemble) if count > 0 else None
        for remaining in reversed(range(count)):
            assert ahead is not None
            update = ahead.result()
            if remaining:
                ahead = pool.submit(assemble)
            yield update
