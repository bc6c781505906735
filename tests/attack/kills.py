"""The kill storm: a command is killed at a point, its resumption at another, and so on; the last one may finish. What it leaves
must be what a command leaves that nobody disturbed, to the bit, and no file more."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

from counting import Tally
from processes import Child, Ended, Operations, command
from stage import Attacked, compare, contents, fresh

ON_THE_CLOCK = 8  # one of so many chains is one kill at a moment of its first half, and not at operations


class Storm:
    def __init__(self, attacked: Attacked, stage: Path, folder: Path, seed: int):
        self.attacked, self.stage, self.folder, self.seed = attacked, stage, folder, seed
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        root = fresh(stage, folder / "whole", self.attacked.changes)
        ended = self.start(root).wait()
        assert ended.code == 0, f"{attacked.name} undisturbed: {ended.output}"
        self.whole, self.operations, self.seconds = contents(root, root), ended.operations, ended.seconds
        if attacked.side_by_side:  # a count of several processes may miss some
            self.operations = int(0.9 * self.operations)

    def start(self, root: Path, operations: Operations | None = None, resume: Sequence[object] = ()) -> Child:
        return Child(command(*self.attacked.words, *resume), root, self.output, operations)

    def storm(self, first: int, step: int, kills: int) -> Tally:
        """So many kills, or a few more. The first of each chain goes through all operations, from `first` on in steps."""
        tally, chain = Tally(), first
        while tally.kills < kills:
            self._chain(chain, tally)
            chain += step
            if tally.failures:
                tally.wrong[-1] += f" ({self.attacked.name}, chain {chain - step})"
        return tally

    def _chain(self, chain: int, tally: Tally) -> None:
        draw = random.Random(f"{self.seed} {self.attacked.name} {chain}")
        root = fresh(self.stage, self.folder / "killed", self.attacked.changes)
        tally.cases += 1
        told: list[object] = []
        if chain % ON_THE_CLOCK == ON_THE_CLOCK - 1:
            share = draw.random() / 2
            told.append(f"{share:.2f} of its time")
            self._kill_by_clock(root, share)
            tally.kills += 1
        else:
            later = max(1, self.operations // max(1, self.attacked.kills - 1))  # much may be done by then
            for turn in range(self.attacked.kills):
                at = 1 + (chain % self.operations if turn == 0 else draw.randrange(later))
                torn = draw.random() if draw.random() < 0.5 else None
                told.append(at)
                ended = self.start(root, Operations(at, torn), self.attacked.resume if turn else ()).wait()
                if ended.killed:
                    tally.kills += 1
                elif not self._good(ended, tally, f"killed at {told}"):
                    return
        self._good(self.start(root, resume=self.attacked.resume).wait(), tally, f"killed at {told}", root)

    def _kill_by_clock(self, root: Path, share: float) -> None:
        """Sooner where it was done by then."""
        while True:
            child = self.start(root)
            time.sleep(share * self.seconds)
            child.kill()
            if child.wait().killed:
                return
            share /= 2
            fresh(self.stage, root, self.attacked.changes)

    def _good(self, ended: Ended, tally: Tally, when: str, root: Path | None = None) -> bool:
        """One that was not killed must have done its work."""
        what = f"{self.attacked.name}, {when}: "
        if ended.code is None:
            tally.count("hangs", what + ended.output[-500:])
        elif ended.code:
            tally.count("tracebacks", what + f"exit code {ended.code}: {ended.output[-1500:]}")
        elif root is not None:
            different, more = compare(contents(root, root), self.whole)
            if different:
                tally.count("differences", what + ", ".join(different[:5]))
            if more:
                tally.count("left", what + ", ".join(more[:5]))
            if not different and not more:
                tally.accepted += 1
        return ended.code == 0
