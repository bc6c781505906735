"""Serves the page on this machine. gradio's app knows many routes (uploads, files, proxies) that this page has no use for:
only those that it needs are open, so nothing but the page can be read through it."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.explore.page import build, looks
from pnn.explore.reorganise import parsed, write_zip
from pnn.explore.runs import expanded, named_runs
from pnn.explore.subjects import Subject, open_subjects
from pnn.progress import say

OPEN = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt|reorganised\.zip)|/(assets|static|svelte)/[\w./-]*"
    r"|/gradio_api/(queue/(join|data)|heartbeat/\w+|cancel|startup-events|theme\.css)"
)
EVERYWHERE = ("0.0.0.0", "::")  # then any name may lead here


class OnlyOpenRoutes:
    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not OPEN.fullmatch(scope["path"]):
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"not part of this page"})
        else:
            await self.app(scope, receive, send)


class KnownFunctions:
    """Gradio fails over a function that its page does not have (status 500). No browser asks for one: it is refused before."""

    def __init__(self, app: Any, numbers: Collection[int]):
        self.app, self.numbers = app, numbers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith("/queue/join"):
            await self.app(scope, receive, send)
            return
        messages: list[Any] = []
        body = b""
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        if self._asks_for_another(body):
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page has no such function"})
            return

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)

    def _asks_for_another(self, body: bytes) -> bool:
        try:
            asked = json.loads(body)
        except ValueError:
            return False  # gradio refuses that itself
        return isinstance(asked, dict) and asked.get("fn_index") not in self.numbers


def make_server(names: Sequence[str], host: str = "127.0.0.1") -> Any:
    """A uvicorn.Server, to be run on a socket."""
    import gradio as gr  # the extra `app`
    import uvicorn
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    names = expanded(names)
    subjects, problems = open_subjects(names)
    folders = named_runs(names)  # one that has no checkpoint yet can be followed
    if not subjects and not folders:
        raise UserError("; ".join(problems))
    app = FastAPI(openapi_url=None)
    app.add_middleware(OnlyOpenRoutes)
    if host not in EVERYWHERE:  # a page of others must not reach this one under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "127.0.0.1", "localhost"])
    app.add_api_route("/reorganised.zip", download(subjects))
    page = build(subjects, problems, folders).queue(api_open=False)
    unused = {"ssr_mode": False, "pwa": False, "mcp_server": False, "enable_monitoring": False, "run_history": False}
    app = gr.mount_gradio_app(app, page, "", server_name=host, show_error=False, footer_links=[], **unused, **looks())
    # browsers hold a connection open: Ctrl-C does not wait for them to leave, and says nothing of what it cut off
    checked = KnownFunctions(app, list(page.fns))
    return uvicorn.Server(uvicorn.Config(checked, log_level="critical", timeout_graceful_shutdown=1))


def download(subjects: list[Subject]) -> Callable[..., Any]:
    """Answers with a model less some heads, by the names that the page's link has."""
    from starlette.background import BackgroundTask
    from starlette.responses import FileResponse, PlainTextResponse

    named = {subject.name: subject for subject in subjects if subject.reorganises}

    def answer(model: str, without: str) -> Any:
        handle, name = tempfile.mkstemp(suffix=".zip")
        os.close(handle)
        file = Path(name)
        try:
            if model not in named:
                raise UserError(f"no model {model!r} on this page")
            write_zip(named[model], parsed(without), file)
        except UserError as error:
            file.unlink()
            return PlainTextResponse(str(error), 400)
        return FileResponse(file, filename=f"{Path(model).name}-reorganised.zip", background=BackgroundTask(file.unlink))

    return answer


def serve(names: Sequence[str], host: str, port: int, browser: bool) -> None:
    """The page about these models, until Ctrl-C."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from None
    with listening:
        address = f"http://{'127.0.0.1' if host in EVERYWHERE else host}:{listening.getsockname()[1]}"
        server = make_server(names, host)
        say(f"Open {address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)  # it waits for the server, which listens already
        server.run(sockets=[listening])
