"""Two processes at one folder, started at once or one shortly after the other: one may be refused, and the result is that of an
undisturbed one. How often one is refused depends on the machine, so it is not counted."""

from __future__ import annotations

import random
import time
from pathlib import Path

from counting import Tally
from kills import Storm
from processes import Child, Operations, command
from stage import Attacked, compare, contents, fresh


def together(attacked: Attacked, stage: Path, folder: Path, seed: int, count: int) -> Tally:
    tally, storm = Tally(), Storm(attacked, stage, folder, seed)
    for case in range(count):
        draw = random.Random(f"{seed} {attacked.name} together {case}")
        root = fresh(stage, folder / "together", attacked.changes)
        tally.cases += 1
        resume = attacked.resume if draw.random() < 0.5 else ()
        if resume:  # something to go on with
            storm.start(root, Operations(1 + draw.randrange(storm.operations))).wait()
        first = Child(command(*attacked.words, *resume), root, folder / "first.txt")
        time.sleep(draw.random() ** 2 * storm.seconds)
        second = Child(command(*attacked.words, *(attacked.resume if draw.random() < 0.7 else ())), root, folder / "second.txt")
        ended = [first.wait(), second.wait()]
        what = f"{attacked.name} twice, case {case}: "
        for one in ended:
            if one.code is None:
                tally.count("hangs", what + one.output[-500:])
            elif one.code and not one.refused:
                tally.count("tracebacks", what + one.output[-900:])
        last = storm.start(root, resume=attacked.resume).wait()
        if last.code:
            tally.count("tracebacks", what + f"afterwards: {last.output[-500:]}")
            continue
        different, more = compare(contents(root, root), storm.whole)
        if different:
            tally.count("differences", what + ", ".join(different[:5]))
        if more:
            tally.count("left", what + ", ".join(more[:5]))
        tally.accepted += not different and not more
    return tally
