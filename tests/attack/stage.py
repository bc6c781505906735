"""The place of the attacks: tiny models, texts and task files, and the commands that are attacked."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
LENGTH = 24
TINY: dict[str, Any] = {
    "model": {
        "type": "pnn",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_steps": 2,
        "dropout": 0.1,
    },
    "data": {"train": "synthetic", "synthetic_paragraphs": 60, "validation_sequences": 10, "max_length": LENGTH},
    "training": {
        "max_steps": 6,
        "batch_size": 4,
        "effective_batch_size": 4,
        "learning_rate": 2.0e-3,
        "warmup_steps": 2,
        "log_every": 1,
        "evaluate_every": 3,
        "save_every": 2,
        "average_decay": 0.9,
        "tensorboard": False,
    },
}
# quickstart's own configs, as small
SMALL = ["data.synthetic_paragraphs=60", "data.validation_sequences=10", f"data.max_length={LENGTH}"]
SMALL += ["training.max_steps=2", "training.batch_size=4", "training.effective_batch_size=4", "training.save_every=1"]
SMALL += ["training.evaluate_every=1", "training.tensorboard=false", "model.hidden_size=16", "model.intermediate_size=16"]
SMALL = [word for one in SMALL for word in ("--set", one)]
INPUTS = ("tiny.yaml", "text.yaml", "text.txt", "decoder", "encoder", "tasks")


@dataclass(frozen=True)
class Attacked:
    """A command that writes a folder, and how to go on with it after a kill."""

    name: str
    words: Sequence[object]
    resume: Sequence[object] = ()  # further words
    kills: int = 3  # of one command, before it may finish
    changes: Sequence[str] = ()  # inputs that it writes into
    side_by_side: bool = False  # with processes that overtake one another


COMMANDS = [
    Attacked("train", ["train", "tiny.yaml", "--output", "out"], ["--resume"]),
    Attacked("prepare", ["data", "prepare", "text.yaml"]),
    Attacked(
        "cycle",
        [
            *("plasticity", "cycle", "decoder", "--data", "text.txt", "--output", "out", "--rounds", 2, "--learn-steps", 2),
            *("--evaluate-every", 2, "--validation-rows", 4, "--batch-size", 2),
        ],
        ["--resume"],
    ),
    Attacked(
        "study",
        [
            *("plasticity", "study", "decoder", "--data", "text.txt", "--output", "out", "--seeds", 1, "--learn-steps", 1),
            *("--validation-rows", 2, "--batch-size", 1, "--score-rows", 2, "--evaluate-every", 1),
        ],
        ["--resume"],
        kills=10,
    ),
    Attacked(
        "finetune",
        ["finetune", "encoder", "--task", "cola,rte", "--data", "tasks", "--output", "out", "--epochs", 1, "--batch-size", 8],
    ),
    Attacked("sweep", ["sweep", "tiny.yaml", "--over", "training.learning_rate=1e-3,2e-3", "--jobs", 1, "--output", "out"]),
    Attacked("calibrate", ["calibrate", "run", "--lose", 20], changes=["run"]),
    Attacked(
        "shrink",
        [
            *("shrink", "decoder", "--parameters", "-20%", "--data", "text.txt", "--output", "out", "--learn-steps", 2),
            *("--validation-rows", 4, "--batch-size", 2, "--score-rows", 4),
        ],
        ["--resume"],
    ),
    Attacked(
        "quickstart",
        ["quickstart", "--output", "out", *SMALL],
        kills=1,
        side_by_side=True,
    ),
]


def import_all() -> None:
    """What commands load, once and before anything is forked."""
    sys.path[:0] = [str(HERE.parent / folder) for folder in ("support", "finetuning")]
    from forking import import_all as load

    load()


def quick() -> None:
    """Less of what takes time and changes nothing that is written: timing, drawing, new Pythons for every training."""
    import matplotlib.figure
    from processes import Job

    import pnn.training.jobs as jobs
    import pnn.training.loop as loop
    import pnn.training.tracking as tracking
    from pnn.evaluation import choosing
    from pnn.plasticity import measure

    measure.take_turns = choosing.take_turns = _untimed
    # seconds in a checkpoint, and what is said of the code, have as many letters in every run: damage hits the same places
    tracking.code_version = lambda: {"commit": "0" * 40, "changed": False}
    ticks = itertools.count()
    loop.time = SimpleNamespace(perf_counter=lambda: next(ticks) / 8, monotonic=time.monotonic)  # type: ignore[assignment]
    jobs.POLL = 0.002
    jobs.Job.start = lambda self, threads, log: Job(self.words, log)  # type: ignore[assignment, method-assign, return-value]
    matplotlib.figure.Figure.savefig = _undrawn


def _untimed(runs: Mapping[str, Callable[[], object]], *_: Any, **__: Any) -> dict[str, list[float]]:
    """Everything once. The later of two counts as the faster one, so that what time decides is always the same."""
    for run in runs.values():
        run()
    return {name: [1 / turn] for turn, name in enumerate(runs, 1)}


def _undrawn(figure: Any, file: Any, **how: Any) -> None:
    file.write("<svg></svg>" if isinstance(file, io.StringIO) else b"\x89PNG")


def build(folder: Path) -> None:
    """Everything that a command is given."""
    import torch
    import transformers as hf
    from fuzz import call, inside
    from official_files import sentence, write_glue

    from pnn.data import synthetic
    from pnn.data.tokenizers import of_synthetic_language, trained_on
    from pnn.models import PNNConfig, PNNForMaskedLM
    from pnn.plasticity import save

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("\n\n".join(synthetic.paragraphs(40, seed=0)))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    of_text = {**TINY["data"], "train": "text.txt", "vocab_size": 80, "filter": "none"}
    (folder / "text.yaml").write_text(yaml.safe_dump({**TINY, "data": of_text}))
    torch.manual_seed(0)
    tokenizer = of_synthetic_language(LENGTH)
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=20, n_head=5, n_layer=2, n_positions=LENGTH)
    config.bos_token_id = config.eos_token_id = tokenizer.sep_token_id
    save(hf.GPT2LMHeadModel(config), folder / "decoder", tokenizer)
    words = trained_on([sentence(number) for number in range(100)], 100, LENGTH)
    size = {"vocab_size": len(words), "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    PNNForMaskedLM(PNNConfig(**size, num_steps=2, max_position_embeddings=LENGTH)).save_pretrained(folder / "encoder")
    words.save_pretrained(folder / "encoder")
    write_glue(folder / "tasks", 8, 6)
    with inside(folder):
        code, said, failed = call("train", "tiny.yaml", "--output", "run")
    assert code == 0, failed or said


def fresh(stage: Path, folder: Path, copies: Sequence[str] = ()) -> Path:
    """An empty folder beside the stage's inputs: links, but for `copies`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in INPUTS:
        (folder / name).symlink_to(os.path.relpath(stage / name, folder))
    for name in copies:
        shutil.copytree(stage / name, folder / name, symlinks=True)
    return folder


# What a command leaves, without what may differ: when it was, where it lies and how fast it went -----------------------

TIMES = {"seconds", "tokens_per_second", "timestamp", "speed", "experiment_name", "git"}
ANY_CONTENT = (".png", ".html")  # they show times
TIMED_STATE = "trainer_state.json"  # holds seconds, so its checksum differs


def contents(folder: Path, root: Path) -> dict[str, Any]:
    """Every file and link below, by its name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = _content(path, root)
    return found


def _content(path: Path, root: Path) -> Any:
    if path.suffix in ANY_CONTENT or path.parent.name == "speed":
        return None
    raw = path.read_bytes().replace(str(root.resolve()).encode(), b".")
    if path.suffix == ".json":
        value = _timeless(json.loads(raw))
        if path.name == "checksums.json":
            value.pop(TIMED_STATE, None)
        return value
    if path.suffix == ".jsonl":
        return [_timeless(json.loads(one)) for one in raw.splitlines()]
    return raw


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def compare(found: dict[str, Any], whole: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of what differs or is missing, and of what should not be there."""
    return sorted(name for name in whole if found.get(name, ...) != whole[name]), sorted(found.keys() - whole.keys())
