"""`pnn explore` as a command: what it refuses, and a page that answers until it is stopped."""

import signal
import socket
import sys
import time
import urllib.request

import pytest


@pytest.fixture
def needs_gradio():
    pytest.importorskip("gradio", reason="the page needs the extra app")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is nothing to explore: name a model"),
        (["none"], "no run or checkpoint at none"),
        (["owner/name", "owner/name"], "named twice"),
    ],
)
def test_what_cannot_be_explored_is_one_sentence(pnn_command, needs_gradio, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    code, _, err = pnn_command("explore", *words, "--no-browser", "--port", 0)
    assert code == 2
    assert says in err


def test_a_taken_port_is_told_before_anything_is_loaded(pnn_command, needs_gradio, trained_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = pnn_command("explore", trained_run, "--no-browser", "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_without_the_extra_it_says_what_to_install(pnn_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, _, err = pnn_command("explore", "any")
    assert code == 2
    assert "pip install gradio" in err


@pytest.mark.slow
def test_it_serves_until_it_is_stopped(start_pnn, needs_gradio, trained_run):
    process = start_pnn("explore", trained_run, "--no-browser", "--port", 0)
    while not process.output().endswith("\n"):
        assert process.poll() is None, process.output()
        time.sleep(0.02)
    address = process.output().splitlines()[0].split()[1]
    with urllib.request.urlopen(address) as page, urllib.request.urlopen(f"{address}/gradio_api/heartbeat/me"):
        assert b"pnn explore" in page.read()
        process.send_signal(signal.SIGINT)  # while a browser holds a connection open
        process.wait(60)
    assert "Traceback" not in process.output()
