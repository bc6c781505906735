"""The explorer's server under bad input: paths, methods, headers and bodies that no browser sends, and texts that a person
could type. It must answer everything, with no fault of its own (5xx), still serve its page afterwards, and leave no file."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from counting import Tally
from damage import ODD, spoil, spoil_json
from fuzz import draws, inside
from fuzz_folders import made_once

SECONDS = 30.0  # for an answer
PATHS = [
    "/",
    "/config",
    "/reorganised.zip",
    "/gradio_api/queue/join",
    "/gradio_api/queue/data",
    "/gradio_api/upload",
    "/file=x",
]
PATHS += ["/assets/../../etc/passwd", "/assets/%2e%2e/%2e%2e/etc/passwd", "/static/x", "/gradio_api/heartbeat/x", "//", "/%00"]
PATHS += ["/gradio_api/file=/etc/passwd", "/proxy=http://x", "/gradio_api/cancel", "/theme.css", "/login", "/monitoring", "/é"]
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "NONSENSE"]
HEADERS: list[dict[str, str]] = [{}, {"Host": "evil.example"}, {"Content-Type": "application/json"}, {"Content-Type": "x"}]
HEADERS += [{"Content-Length": "-1"}, {"Range": "bytes=9-1"}, {"Cookie": "=" * 300}, {"Transfer-Encoding": "chunked"}]
TEXTS = ["", " ", "[MASK]", "[MASK] " * 300, "\x00", "é\u202e\U0001f600", "<script>alert(1)</script>", "a" * 30_000, "\n" * 500]
TEXTS += ["the monk is [MASK] in avon .", "[CLS] [SEP] [PAD]", "\ud7ff\ufffe", "{}", "%s", "\t\r\n", "x\u0301" * 100]


class Server:
    """`pnn explore` of a run and a decoder, on a thread."""

    def __init__(self, made: Path):
        from pnn.explore.server import make_server

        self.server = make_server([str(made / "run"), str(made / "decoder")])
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and the beginning of the answer; of a stream of events the first."""
        connection = http.client.HTTPConnection(self.address, timeout=SECONDS)
        try:
            connection.putrequest(method, quote(path, safe="/%?=&.:"), skip_host="Host" in (headers or {}))
            sent = dict(headers or {})
            if body is not None and "Content-Length" not in sent and "Transfer-Encoding" not in sent:
                sent["Content-Length"] = str(len(body))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            if body:
                connection.send(body)
            answer = connection.getresponse()
            streams = "event-stream" in (answer.getheader("content-type") or "")
            return answer.status, b"" if streams else answer.read(1_000_000)
        finally:
            connection.close()

    def event(self, function: int, data: list[Any], session: str, event_data: Any = None) -> dict[str, Any] | None:
        """What one of the page's functions answers, as a browser asks it; None where the request itself is refused."""
        body = {"data": data, "event_data": event_data, "fn_index": function, "session_hash": session}
        status, _ = self.ask("POST", "/gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"})
        if status >= 500:
            raise RuntimeError(f"status {status}")
        if status != 200:
            return None
        events = http.client.HTTPConnection(self.address, timeout=SECONDS)
        events.request("GET", f"/gradio_api/queue/data?session_hash={session}")
        for line in events.getresponse():
            if line.startswith(b"data: ") and (found := json.loads(line[6:]))["msg"] == "process_completed":
                return found
        raise RuntimeError("the server went away")


def pages(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    tally, made = Tally(), made_once(stage)
    with inside(folder):
        Path("temporary").mkdir(exist_ok=True)
        tempfile.tempdir = str(Path("temporary").resolve())
        server = Server(made)
        for number, draw in enumerate(draws("pages", seed, first, count)):
            tally.cases += 1
            what = ""
            try:
                if draw.random() < 0.5:
                    what, kind = _request(server, draw)
                else:
                    what, kind = _typed(server, draw, f"s{first + number}")
                tally.count(kind, what)
            except TimeoutError:
                tally.count("hangs", what)
            except (http.client.HTTPException, ConnectionError):
                tally.refused += 1  # what is no HTTP is cut off
            except Exception as error:
                tally.count("tracebacks", f"{what}: {type(error).__name__}: {error}")
        status, page = server.ask("GET", "/")
        if status != 200 or b"pnn explore" not in page:
            tally.count("tracebacks", f"afterwards the page has status {status}")
        server.server.should_exit = True
        server.thread.join(10)
        for file in Path("temporary").rglob("*.zip"):
            tally.count("left", str(file))
    return tally


def _request(server: Server, draw: random.Random) -> tuple[str, str]:
    """Anything that a socket can be sent as HTTP."""
    path = draw.choice(PATHS)
    if path == "/reorganised.zip" or draw.random() < 0.2:
        path += "?" + draw.choice(
            ["", "model=run", "model=run&without=", "model=run&without=0.0", "model=..&without=9.9", "without=x"]
        )
    if draw.random() < 0.2:
        path = "/" + spoil(path.encode(), draw)[:200].hex()
    method, headers = draw.choice(METHODS), draw.choice(HEADERS)
    good = {"data": ["run", "run", "x", []], "event_data": None, "fn_index": 0, "session_hash": "x"}
    bodies = [b"", draw.randbytes(30), json.dumps(draw.choice(ODD)).encode(), json.dumps(spoil_json(good, draw)).encode()]
    body = draw.choice(bodies) if method != "GET" else None
    what = f"{method} {path} {headers} {(body or b'')[:80]!r}"
    status, answer = server.ask(method, path, body, headers)
    if b"root:" in answer:
        return f"{what}: a file of the machine was served", "differences"
    return (
        f"{what}: status {status}",
        "tracebacks" if status >= 500 and status != 501 else "refused" if status >= 400 else "accepted",
    )


def _typed(server: Server, draw: random.Random, session: str) -> tuple[str, str]:
    """A text that a person could type, with models that the page offers; or values that it does not."""
    text = (
        draw.choice(TEXTS)
        if draw.random() < 0.7
        else "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(draw.randrange(60)))
    )
    data: list[Any] = ["run", "no other", text, None]
    typed = draw.random() < 0.6
    if not typed:
        data = spoil_json(data, draw)
        data = data if isinstance(data, list) else [data]
    function = 0 if typed else draw.randrange(-1, 14)
    what = f"function {function} of {json.dumps(data)[:200]}"
    answer = server.event(
        function, data, session, draw.choice([None, None, {"index": draw.choice(ODD)}]) if not typed else None
    )
    if answer is None:
        return what, "refused"
    if typed and not answer["success"]:
        return f"{what}: {str(answer)[:300]}", "tracebacks"
    return what, "accepted" if answer["success"] else "refused"


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
