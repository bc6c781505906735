"""The run folder: who may write it, where its checkpoint is, and whether that can be trusted.

runs/<name>/  config.yaml  environment.json  tokens.json  metrics.jsonl  checkpoints/{step-…,best,last}/  evaluation.json  …
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pnn.config import RunConfig, load_config
from pnn.errors import UserError, closest
from pnn.files import hold, is_taken, make_folder, remove_leftovers, sha256, write_text
from pnn.results import Environment, fits

BY_SEQUENCE = "evaluation_by_sequence.json"  # beside evaluation.json: the totals of every sequence
REFINING = "refining.json"  # beside it, of a masked model: how it rewrites its predictions of one held-out text
# Settings that do not change what is learnt and may differ when a run is resumed
FREE_ON_RESUME = {
    "name",
    "data.prepared",
    "training.batch_size",  # how many sequences fit into memory; an update stays an update
    "training.log_every",
    "training.save_every",
    "training.keep_checkpoints",
    "training.tensorboard",
    "training.trackers",
    "evaluation.sets",
    "evaluation.batch_tokens",
}
AVERAGE = "checkpoints/average"  # in a run folder: its averaged weights, where it kept any
TRAINING_STATE = ("optimizer.safetensors", "trainer_state.json")  # of a checkpoint: read by nothing but --resume


def check_free(run: Path, config: RunConfig, resume: bool) -> None:
    """Make sure that `run` may be this run's folder: a new one, or the same run being resumed. Writes nothing."""
    held = run / "config.yaml"
    if run.is_file():
        raise UserError(f"{run} is a file: --output names a folder")
    if not resume:
        if is_taken(run):
            raise UserError(
                f"{run} already holds another run or other files: choose another --output, or continue it with --resume"
            )
    elif is_taken(run) and not held.exists():
        raise UserError(f"cannot resume {run}: it holds files but no config.yaml, so it is not a run folder")
    elif held.exists():
        before, now = flat(read_config(run).to_dict()), flat(config.to_dict())
        for key in sorted(before.keys() | now.keys()):
            free = any(key == name or key.startswith(name + ".") for name in FREE_ON_RESUME)
            if before.get(key) != now.get(key) and not free:
                raise UserError(
                    f"cannot resume {run}: {key} was {before.get(key)!r} and is now {now.get(key)!r} "
                    "(a resumed run must be the same run; another --output starts a new one)"
                )


def claim(run: Path, config: RunConfig, resume: bool) -> None:
    """Make the folder this process's own. Another one may have been faster since `check_free`."""
    make_folder(run)
    hold(run)
    check_free(run, config, resume)
    remove_leftovers(run)
    write_text(run / "config.yaml", config.to_yaml())


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def read_config(run: Path) -> RunConfig:
    if is_cycle(run):
        raise UserError(
            f"{run} is the folder of a plasticity cycle, not of a training run: what it found is in summary.json and figures/"
        )
    if not (run / "config.yaml").exists():
        raise UserError(f"{run} is not a run folder: no config.yaml")
    return load_config(str(run / "config.yaml"))


def run_of(checkpoint: Path | str) -> Path | None:
    """The run folder that a checkpoint lies in, if any; a name on the hub lies in none."""
    if isinstance(checkpoint, str):
        return None
    run = checkpoint.resolve().parent.parent
    return run if (run / "config.yaml").exists() else None


def is_cycle(folder: Path) -> bool:
    return (folder / "cycle.json").exists()


def is_finished(run: Path) -> bool:
    """Whether its training came to its end and its best was measured: `pnn evaluate` also measures runs that were stopped. Of a
    run whose checkpoints are gone, its evaluation alone says so."""
    if not (run / "evaluation.json").exists():
        return False
    state, best = (run / "checkpoints" / name for name in ("last/trainer_state.json", "best"))
    if not state.exists():
        return True
    found, measured = read_json(state), read_json(run / "evaluation.json")
    try:
        *_, updates = found["text"]  # the trainer puts the planned updates last
        ended = int(found["step"]) >= int(updates)
        of_best = not best.is_symlink() or measured["checkpoint"] == best.resolve().name
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{state} or {run / 'evaluation.json'} is damaged: it does not say how far the run came") from None
    return ended and of_best


def without_text(run: str | Path, checkpoint: Path | str) -> str:
    """Why a RUN names no text to be measured on, as the beginning of a sentence."""
    if isinstance(checkpoint, Path) and is_cycle(checkpoint.resolve().parent.parent):
        return f"{run} is of a plasticity cycle, which keeps no text to measure on (what it measured itself is in summary.json)"
    return f"{run} is a checkpoint without a run folder"


def short_names(names: Sequence[str | Path]) -> list[str]:
    """The ends of the paths, as much of each as tells all of them apart."""
    parts = [Path(os.path.abspath(name)).parts for name in names]
    for length in range(1, max(map(len, parts))):
        ends = ["/".join(path[-length:]) for path in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(name) for name in names]


def find_checkpoint(run: str | Path) -> Path | str:
    """A RUN is a run folder (its best checkpoint, else its last), a checkpoint folder, or a hub name."""
    path = Path(run)
    if (path / "config.json").exists():
        return path
    for name in ("best", "last"):
        if (path / "checkpoints" / name / "config.json").exists():
            return (path / "checkpoints" / name).resolve()
    if path.is_file():
        raise UserError(f"{run} is a file: give the folder of a run or a checkpoint")
    if path.exists():
        inside = sorted(str(folder.parent) for folder in path.glob("*/checkpoints"))
        hint = f"; did you mean {' or '.join(inside[:3])}?" if inside else ""
        raise UserError(f"{run} holds no checkpoint (looked for checkpoints/best, checkpoints/last and config.json){hint}")
    if path.is_symlink():
        there = os.readlink(path)
        raise UserError(f"{run} links to {there}, which is not there: copy checkpoints with cp -rL, or pnn export them")
    # before the hub is asked: without a network that takes half a minute
    if meant := closest(path.name, sorted(other.name for other in path.parent.glob("*/"))):
        raise UserError(f"no run or checkpoint at {run}; did you mean {path.parent / meant}?")
    if is_hub_name(run):
        return str(run)
    raise UserError(f"no run or checkpoint at {run}")


def is_hub_name(run: str | Path) -> bool:
    """Whether what is no folder here may be owner/name on the hub."""
    name = str(run)
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "runs/")) and not Path(run).exists()


def verify_model(folder: Path) -> None:
    """Compare the files that make the model with their checksums, and leave the state of its training unread."""
    _verify(folder, leave_out=TRAINING_STATE)


def verify_checkpoint(folder: Path) -> None:
    """Compare every file with its checksum, as going on with the training needs."""
    _verify(folder)


def _verify(folder: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Folders of other origin, without checksums, pass. Weights that a listing leaves out are not checked by it."""
    listing = folder / "checksums.json"
    if not listing.exists():
        return
    try:
        expected = json.loads(listing.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        expected = None
    if not isinstance(expected, dict) or not all(isinstance(digest, str) for digest in expected.values()):
        raise UserError(f"{listing} is damaged: the checkpoint cannot be trusted")
    unlisted = sorted({path.name for path in folder.glob("*.safetensors")} - expected.keys() - {*leave_out})
    if unlisted:
        raise UserError(f"{listing} does not list {unlisted[0]}: the checkpoint cannot be trusted")
    for name, digest in expected.items():
        if name in leave_out:
            continue
        if not (folder / name).exists():
            raise UserError(f"{folder / name} is missing: the checkpoint is not whole")
        if sha256(folder / name) != digest:
            raise UserError(f"{folder / name} does not match its checksum: the checkpoint is damaged")


def read_environment(run: Path) -> Environment:
    return read_result(run / "environment.json", Environment, "remove it to go on without")


def check_commit(run: Path) -> None:
    """Refuse a run that cannot say which code made it: its numbers are not to be published."""
    found = read_json(run / "environment.json")
    if not isinstance(found, dict) or not found.get("git"):
        raise UserError(
            f"{run}: its environment.json names no commit, so its numbers could not be repeated: "
            "run `make stamp` before you copy the code to another machine, then train there"
        )


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error})") from None


def read_result(path: Path, kind: Any, again: str) -> Any:
    """A JSON file of this kind of `results`. `again`: how to have it written anew, for the message."""
    found = read_json(path)
    if not fits(found, kind):
        raise UserError(f"{path} is damaged, or not what its name says: {again}")
    return found


def read_metrics(path: Path, needed: Sequence[str] = ()) -> list[Any]:
    """The rows of a metrics file, each with numbers under the `needed` keys. A last line that was cut off by a kill is
    dropped."""
    rows: list[Any] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
            if number == len(lines):
                break
        if not isinstance(row, dict) or not all(isinstance(row.get(key), int | float) for key in needed):
            raise UserError(f"{path} is damaged in line {number}: remove what follows it, or restore a copy")
        rows.append(row)
    return rows
