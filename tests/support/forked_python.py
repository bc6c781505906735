"""Stands for Python where something starts `python -m …` by its path, as launchers do: the server of forking.py forks what is
to be run, with this process's folder, environment and outputs. Signals go there, the exit code comes from there."""

import json
import os
import signal
import socket
import sys


def main(place: str, *words: str) -> int:
    flag, module, *rest = (word for word in words if word != "-u")
    if flag != "-m":
        raise SystemExit(f"only modules are forked, not {words}")
    request = {"argv": [module, *rest], "module": module, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [b"\n"], [1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:  # as it was ended
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
