"""Writing files so that a reader never sees half of one: write beside, flush to disk, rename."""

from __future__ import annotations

import errno
import fcntl
import glob
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
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    partial = _beside(path)
    try:
        with room_on_disk(path):
            with open(partial, "wb") as f:
                f.write(content)
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
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    write_json(folder / "checksums.json", {path.name: sha256(path) for path in files})


def is_taken(path: Path) -> bool:
    """Whether something is there that a new folder of this name would replace. Nothing and leftovers of a kill are not."""
    return path.exists() and (not path.is_dir() or any(".partial-" not in inside.name for inside in path.iterdir()))


def make_folder(folder: Path) -> None:
    """Make it, and those above it, if they are not there."""
    with room_on_disk(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_make(folder, error) from error


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it appears under its name only if the block succeeds, and not at all if it fails. Where another
    process made the same folder meanwhile, theirs stays."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(target, error) from error
    partial = _beside(target)
    try:
        partial.mkdir()
    except OSError as error:
        raise _cannot_make(target, error) from error
    try:
        with room_on_disk(target):
            yield partial
            readers = partial.stat().st_mode & 0o666
            for file in partial.rglob("*"):
                if file.is_file():
                    file.chmod(readers)  # safetensors gives its files to their owner alone, whatever the umask says
                    with open(file, "rb") as f:
                        os.fsync(f.fileno())
        try:
            os.rename(partial, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_HELD: dict[Path, int] = {}  # folders that this process works in, with a descriptor of each


def hold(folder: Path) -> None:
    """Keep other processes out of a folder that this one works in, until `let_go` or the end of the process, however it ends.
    The lock is on the folder itself: nothing is left behind. Where a file system knows no such locks, there is none."""
    if folder.resolve() in _HELD:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another process is working in {folder}: wait for it to end, or choose another --output") from None
    except OSError:
        os.close(descriptor)
    else:
        _HELD[folder.resolve()] = descriptor


def let_go(folder: Path) -> None:
    descriptor = _HELD.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """It is gone at once, or still whole: a kill leaves no half of it under its name."""
    partial = _beside(folder)
    os.rename(folder, partial)
    shutil.rmtree(partial)


def _cannot_make(target: Path, error: OSError) -> UserError:
    """In the name that was asked for: nobody knows the partial one."""
    return UserError(f"cannot make the folder {target} ({error.strerror}): choose a place where folders can be made")


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its sibling `target`, replacing an older one in one step."""
    if link.is_dir() and not link.is_symlink():  # a folder that was copied without its links
        remove_folder(link)
    partial = _beside(link)
    partial.symlink_to(target.name)
    os.replace(partial, link)


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def room_on_disk(path: Path) -> Iterator[None]:
    """Turn a full disk inside the block into a `UserError`, whichever library has met it."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) != errno.EDQUOT and os.strerror(errno.ENOSPC) not in str(error):
            raise
        again = "make room and give the same command again, with --resume where it has one"
        raise UserError(f"no space left on the disk for {path}: {again}") from error


# What is not whole yet lies beside its place, as .NAME.partial-PROCESS ------------------------------------------------


def remove_leftovers(folder: Path) -> None:
    """What processes that were killed left unfinished in a folder and inside."""
    for stale in [*folder.rglob(".*.partial-*")]:
        _remove_if_left(stale)


def _remove_if_left(stale: Path) -> None:
    pid = stale.name.rpartition("-")[2]
    if pid == str(os.getpid()) or not (pid.isdigit() and _alive(int(pid))):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    for stale in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        _remove_if_left(stale)
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def _alive(pid: int) -> bool:
    """One that was killed and that nobody has waited for yet (Z) is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
