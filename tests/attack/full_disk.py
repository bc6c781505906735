"""A disk that is full at every write: a real file system in memory with so many pages, or so many files, and no more.

A command must end with one sentence and nothing half-written; with room again, the same command must go on to the result of an
undisturbed one. Mounting needs root, or a kernel that lets everybody have mounts of their own: elsewhere the attack says so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from counting import Tally
from fuzz import call
from kills import Storm
from processes import Child
from stage import Attacked, compare, contents, fresh

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000
PAGE = os.sysconf("SC_PAGE_SIZE")


def unshare() -> None:
    """Mounts of our own, which go when this process goes."""
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if library.unshare(NEW_MOUNTS | (NEW_USER if user else 0)):
        raise OSError(ctypes.get_errno(), "no mounts of our own")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("--make-rprivate", "/")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, stdin=subprocess.DEVNULL)


def allowed(folder: Path) -> bool:
    """Whether this machine lets us mount."""

    def work() -> int:
        unshare()
        mount("-t", "tmpfs", "-o", f"size={PAGE}", "none", str(folder))
        return 0

    folder.mkdir(parents=True, exist_ok=True)
    return Child(work, folder, folder.with_suffix(".txt")).wait().code == 0


class FullDisk:
    def __init__(self, attacked: Attacked, stage: Path, folder: Path):
        self.attacked, self.stage, self.folder = attacked, stage, folder
        self.storm = Storm(attacked, stage, folder / "storm", 0)
        before = fresh(stage, folder / "before", attacked.changes)
        (pages, files), (pages_before, files_before) = map(_taken, (self.storm.folder / "whole", before))
        self.pages, self.files = pages - pages_before + 1, files - files_before + 1

    def attack(self, count: int) -> Tally:
        """So many sizes of disk, half by pages and half by files, from nothing to what the command needs."""
        tally = Tally()
        for turn in range(count):
            share = (turn // 2) / max(1, count // 2)
            by_pages = turn % 2 == 0
            room = int(share * (self.pages if by_pages else self.files))
            self._one(room, "pages" if by_pages else "files", tally)
        return tally

    def _one(self, room: int, what: str, tally: Tally) -> None:
        place, output = self.folder / "disk", self.folder / "disk.txt"
        place.mkdir(parents=True, exist_ok=True)

        def work() -> int:
            unshare()
            mount("-t", "tmpfs", "-o", "size=1G", "none", str(place))
            root = fresh(self.stage, place / "work", self.attacked.changes)
            disk = os.statvfs(place)
            pages, files = disk.f_blocks - disk.f_bfree, disk.f_files - disk.f_ffree  # of what the command is given
            size = max(1, pages + room) * PAGE  # 0 would be no limit
            mount("-o", f"remount,size={size}" if what == "pages" else f"remount,nr_inodes={files + room}", str(place))
            os.chdir(root)
            code, said, failed = call(*self.attacked.words)
            if code not in (0, 2) or failed:
                return _tell("tracebacks" if code is not None else "hangs", failed or said[-500:])
            if code == 2 and (said.count("pnn: ") != 1 or "space" not in said):
                return _tell("tracebacks", f"it does not say that the disk is full: {said[-500:]}")
            if code == 2 and (found := [path.name for path in root.rglob("*") if ".partial-" in path.name]):
                return _tell("left", f"{found}")
            mount("-o", "remount,size=1G,nr_inodes=1000000", str(place))
            again, said, failed = call(*self.attacked.words, *self.attacked.resume)
            if again or failed:
                return _tell("tracebacks", f"with room again: {failed or said[-500:]}")
            different, more = compare(contents(root, root), self.storm.whole)
            if different or more:
                return _tell("differences" if different else "left", ", ".join([*different, *more][:5]))
            return _tell("refused" if code == 2 else "accepted", "")

        ended = Child(work, self.folder, output).wait()
        tally.cases += 1
        kind, _, example = ended.output.rpartition("\x1e")[2].partition(" ") if "\x1e" in ended.output else ("", "", "")
        example = f"{self.attacked.name} with room for {room} {what}: {example or ended.output[-500:]}"
        tally.count("hangs" if ended.code is None else kind or "tracebacks", example)


def _taken(folder: Path) -> tuple[int, int]:
    """Pages and files."""
    found = list(folder.rglob("*"))
    files = [path for path in found if path.is_file() and not path.is_symlink()]
    return sum(-(-path.stat().st_size // PAGE) for path in files), len(found)


def _tell(kind: str, example: str) -> int:
    print(f"\x1e{kind} {example}", flush=True)
    return 0
