"""Publishing, to a hub that stands in for the real one."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pnn.errors import UserError
from pnn.export import hub
from pnn.export.run import export_run


class Hub(BaseHTTPRequestHandler):
    """What a push needs of the hub: make a repository, say how files are to be sent, take a commit."""

    def answer(self, value, code=200):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"id": "me/model", "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        server = self.server
        if self.path == "/api/repos/create":
            server.created = json.loads(body)
            self.answer({"url": f"http://{self.headers['Host']}/me/model", "id": "me/model", "name": "me/model"})
        elif self.path == "/api/validate-yaml":  # of the model card
            server.card = json.loads(body)["content"]
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self.answer({"files": answer})
        elif "/commit/" in self.path and server.takes:
            for line in body.decode().splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    server.received[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            address = f"http://{self.headers['Host']}/me/model/commit/{'1' * 40}"
            self.answer({"success": True, "commitUrl": address, "commitOid": "1" * 40, "hookOutput": ""})
        else:
            self.answer({"error": "not today"}, 403)

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.received, server.takes = {}, True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_nothing"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this hub is here
    yield server
    server.shutdown()
    thread.join()


def test_every_file_arrives_at_the_hub(checkpoints, stand_in, tmp_path):
    export_run(str(checkpoints["pnn"]), tmp_path / "out", remote_code=True, push_to="me/model")
    sent = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert stand_in.received == sent
    assert "modeling_pnn.py" in sent
    assert stand_in.created["visibility"] == "private"
    assert stand_in.card.startswith("---\nlibrary_name: transformers")


def test_a_hub_that_refuses(checkpoints, stand_in, tmp_path):
    stand_in.takes = False
    with pytest.raises(UserError, match=r"me/model: the hub did not take it .*not today"):
        export_run(str(checkpoints["pnn"]), tmp_path / "out", push_to="me/model")
    assert (tmp_path / "out" / "model.safetensors").exists()  # whole, and can be pushed again
