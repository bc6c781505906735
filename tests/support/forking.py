"""Real processes that start at once: a server that has imported the package forks one for each command. What they are spared is
what `python -m pnn` spends most of its time on, importing torch and transformers; signals, exit codes and their end are real.

This file is also the server: it reads requests as lines of JSON and answers each with one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    """`pnn` with some arguments. Standard output and standard error go to one file, `output()`."""

    def __init__(self, server: Server, pid: int, file: Path):
        self.server, self.pid, self.file = server, pid, file
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask(wait=self.pid)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {timeout} seconds:\n{self.output()}")
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def output(self) -> str:
        return self.file.read_text()


class Server:
    def __init__(self, folder: Path):
        self.folder, self.started = folder, 0
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: object) -> int | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        *arguments: object,
        script: Path | None = None,
        env: Mapping[str, str] | None = None,
        patches: Mapping[str, object] | None = None,
        output: Path | None = None,
    ) -> Process:
        """In the current folder and with the current environment. A script is run in place of the command, with its arguments;
        patches are values of module attributes, by name."""
        self.started += 1
        file = output or self.folder / f"{self.started}.txt"
        file.touch()
        pid = self.ask(
            argv=["pnn", *map(str, arguments)],
            script=script and str(script),
            patches=dict(patches or {}),
            cwd=os.getcwd(),
            env=dict(env or os.environ),
            output=str(file),
        )
        assert pid is not None
        return Process(self, pid, file)

    def python(self) -> Path:
        """An executable that takes `-m MODULE …`, as Python does, and forks it."""
        file, place = self.folder / "python", self.folder / "socket"
        if not file.exists():
            self.ask(listen=str(place))
            stub = Path(__file__).with_name("forked_python.py")
            file.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {stub} {place} "$@"\n')
            file.chmod(0o755)
        return file

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def become(request: dict) -> None:
    """The forked process: from here on it is the command."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    out, err = request.get("outputs") or [os.open(request["output"], os.O_WRONLY | os.O_CREAT)] * 2
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    for name, value in request.get("patches", {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    if request.get("module"):
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    elif request["script"]:
        runpy.run_path(request["script"], run_name="__main__")
    else:
        from pnn.cli import main

        main()


def exit_code(request: dict) -> int:
    try:
        become(request)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(code: int) -> NoReturn:
    """All that Python does at its end except taking every module apart: two seconds, of pages that a fork shares until then."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_door(place: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    door.bind(place)
    door.listen()
    return door


def answer_at(door: socket.socket) -> NoReturn:
    """Fork what forked_python.py asks for, each with a process that waits for it."""
    waiting: set[int] = set()
    while True:
        connection, _ = door.accept()
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if pid == 0:
            door.close()
            keep(connection)
        waiting.add(pid)
        connection.close()


def keep(connection: socket.socket) -> NoReturn:
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    request = json.loads(connection.makefile().read()) | {"outputs": outputs}
    pid = os.fork()
    if pid == 0:
        connection.close()
        end(exit_code(request))
    for number in outputs:
        os.close(number)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def serve() -> None:
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
        elif "listen" in request:
            with open_door(request["listen"]) as door:
                answer = os.fork()
                if answer == 0:
                    answer_at(door)
            running.add(answer)
        else:
            answer = os.fork()
            if answer == 0:
                end(exit_code(request))
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:  # of tests that failed before they ended it, and what answers at the door
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def import_all() -> None:
    import torch
    import transformers

    import pnn
    from pnn.plasticity import measure

    torch.set_num_threads(1)
    measure.SECONDS = 0.0  # as tests/conftest.py has it
    for module in pkgutil.walk_packages(pnn.__path__, "pnn."):
        if not module.name.endswith("__main__") and not module.name.startswith("pnn.kernels."):
            importlib.import_module(module.name)
    for name in ("AutoTokenizer", "PreTrainedTokenizerFast", "GPT2LMHeadModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"):
        getattr(transformers, name)  # loaded when asked for


if __name__ == "__main__":
    gc.disable()
    import_all()
    gc.freeze()  # else the first look for garbage writes to every page that a fork shares
    gc.enable()
    serve()
