"""Writing files so that a reader never sees half of one: write beside, flush to disk, rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pnn.errors import UserError


def write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_between(path: Path, name: str, text: str) -> None:
    """Put text between the marks <!-- name --> and <!-- /name --> of a file."""
    before, first, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
    _, last, after = rest.partition(f"<!-- /{name} -->")
    if not first or not last:
        raise ValueError(f"{path} has no marks for {name}")
    write_text(path, f"{before}{first}\n{text}\n{last}{after}")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_checksums(folder: Path) -> None:
    """checksums.json, of all files that are there."""
    write_json(folder / "checksums.json", {path.name: sha256(path) for path in sorted(folder.iterdir())})


def is_taken(path: Path) -> bool:
    """Whether something is there that a new folder of this name would replace. An empty folder is nothing."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it appears under its name only if the block succeeds, and not at all if it fails. Where another
    process made the same folder meanwhile, theirs stays."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(target, error) from error
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        pid = stale.name.rpartition("-")[2]
        if pid == str(os.getpid()) or not (pid.isdigit() and _alive(int(pid))):  # left by a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
    except OSError as error:
        raise _cannot_make(target, error) from error
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
        try:
            os.rename(partial, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cannot_make(target: Path, error: OSError) -> UserError:
    """In the name that was asked for: nobody knows the partial one."""
    return UserError(f"cannot make the folder {target} ({error.strerror}): choose a place where folders can be made")


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its sibling `target`, replacing an older one in one step."""
    partial = link.with_name(f".{link.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.name)
    os.replace(partial, link)


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
