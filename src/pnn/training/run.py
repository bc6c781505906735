"""Train a config from start to end: the loop, then the evaluation of its best checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from pnn.config import RunConfig
from pnn.errors import Stopped
from pnn.evaluation.run import evaluate_run
from pnn.files import let_go
from pnn.progress import track
from pnn.training.loop import Trainer

# Of several processes. Deleting what averages gradients waits for gloo's threads, and one of them may still want Python's lock
# to let go of a tensor: as the last thing that a training does it would now and then wait for ever.
_held: list[Trainer] = []


def train_run(config: RunConfig, run: Path, *, resume: bool = False, quiet: bool = False) -> bool:
    """Returns whether this process is the one that reports (with several processes, the first)."""
    threads = torch.get_num_threads()
    try:
        trainer = Trainer(config, run, resume=resume, quiet=quiet)
        if trainer.accelerator.num_processes > 1:
            _held[:] = [trainer]
        return _train(trainer)
    finally:
        let_go(run)
        torch.set_num_threads(threads)  # what suited this run need not suit the next


def _train(trainer: Trainer) -> bool:
    try:
        trainer.train()
        if trainer.is_main:
            evaluate_run(trainer.run, progress=track, device=trainer.accelerator.device.type)
        trainer.accelerator.wait_for_everyone()
    except Stopped:  # all processes at once
        trainer.accelerator.end_training()
        raise
    except BaseException:
        # Taking leave of the other processes could mean waiting for them, and they may be waiting for this one: it just
        # goes, and the launcher ends the others.
        for tracker in trainer.accelerator.trackers:
            tracker.finish()
        raise
    trainer.accelerator.end_training()  # closes trackers and the process group
    return trainer.is_main
