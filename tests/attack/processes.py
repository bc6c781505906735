"""Commands in forked processes, which start at once, and points at which they can be killed.

Python says before it opens, renames or removes a file (`sys.addaudithook`): those are the operations that `die_at` counts. A
process dies before its n-th operation; or in the middle of the write before it, which leaves the file's first part.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LONGEST = 120.0  # seconds: a command that takes longer hangs. The longest takes two, on an idle machine
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "attack.serialize"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of commands become ours, so that we see them end


class Operations:
    """Counts what a process is about to change on disk, and ends it, with all that it has started, at the n-th."""

    def __init__(self, die_at: int | None = None, torn: float | None = None):
        self.die_at, self.torn = die_at, torn
        self.shared = mmap.mmap(-1, 8)  # one count for a command and the processes that it forks
        self.last: tuple[str, int] | None = None  # the file that was opened last, and its size then

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(path, str) or not isinstance(flags, int) or not flags & WRITING or path.startswith("/dev/"):
                return
        elif event not in CHANGES:
            return
        self.shared[:] = (self.count + 1).to_bytes(8, "little")
        if self.count == self.die_at:
            self.die()
        if event in ("open", "attack.serialize"):
            file = os.path.abspath(args[0])
            self.last = file, os.path.getsize(file) if os.path.exists(file) else 0

    @property
    def count(self) -> int:
        return int.from_bytes(self.shared[:], "little")

    def die(self) -> None:
        if self.torn is not None and self.last is not None and os.path.isfile(self.last[0]):
            file, before = self.last
            now = os.path.getsize(file)
            if now > before:
                os.truncate(file, before + int(self.torn * (now - before)))
        os.killpg(0, signal.SIGKILL)

    def watch(self) -> None:
        """From here on, for as long as the process lives. Weights are written by Rust, of which Python knows nothing."""
        import safetensors.torch

        serialize = safetensors.torch.serialize_file

        def told(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            sys.audit("attack.serialize", os.fspath(filename))
            serialize(tensors, filename, *args, **kwargs)

        safetensors.torch.serialize_file = told
        sys.addaudithook(self)


@dataclass(frozen=True)
class Ended:
    """How a process ended: an exit code, or less than zero for a signal; None where it had to be killed because it hung."""

    code: int | None
    output: str
    operations: int = 0
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def refused(self) -> bool:
        return self.code == 2 and "Traceback" not in self.output and "pnn: " in self.output


class Child:
    """A function in a forked process and a group of its own. What it writes goes to a file."""

    def __init__(self, work: Callable[[], int], folder: Path, output: Path, operations: Operations | None = None):
        self.output, self.started, self.operations = output, time.monotonic(), operations or Operations()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            _become(work, folder, output, self.operations)
        with contextlib.suppress(OSError):  # the child has done it already, or has ended
            os.setpgid(self.pid, self.pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Until it has ended, and all that it has started."""
        code = self._wait_for(self.pid)
        if code is None:
            self.kill()
            self._wait_for(self.pid)
        seconds = time.monotonic() - self.started
        if code is None or code < 0:
            self.kill()
        while self._reap():
            time.sleep(0.002)
        said = self.output.read_text(encoding="utf-8", errors="replace")
        text, _, count = said.rpartition("\noperations ")
        return Ended(code, text or said, int(count) if text and count.strip().isdigit() else 0, seconds)

    def _wait_for(self, pid: int) -> int | None:
        while time.monotonic() - self.started < LONGEST:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None

    def _reap(self) -> bool:
        """Whether anything of its group is still there."""
        try:
            os.waitpid(-self.pid, os.WNOHANG)
        except ChildProcessError:
            return False
        return True


def _become(work: Callable[[], int], folder: Path, output: Path, operations: Operations) -> None:
    """The forked process. It ends here, and never returns into what its parent was doing."""
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.chdir(folder)
        operations.watch()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, f"\noperations {operations.count}".encode())
        os._exit(code)


def command(*words: object) -> Callable[[], int]:
    """`pnn` with these words, as a function that gives the exit code."""

    def call() -> int:
        from pnn.cli import main

        sys.argv = ["pnn", *map(str, words)]
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return call


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


class Job:
    """What `pnn.training.jobs` starts as a new Python, forked: the same command, less four seconds of imports."""

    def __init__(self, words: list[str], log: IO[bytes]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.dup2(log.fileno(), 2)
                sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  (for as long as it lives)
                code = command(*words)()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `Hang` in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Hang(BaseException):
    """Nobody catches it by accident."""
