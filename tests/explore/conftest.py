"""The page, served to a real Chromium. Where gradio, playwright or the browser is missing, its tests skip and say so."""

import shutil
import socket
import threading
import time

import pytest
import torch
from browser import complaints

from pnn.models.bert import BertBaselineConfig, BertBaselineForMaskedLM
from pnn.models.ddl import DDLConfig, DDLForCausalLM
from pnn.models.loading import load_run


@pytest.fixture(scope="session")
def tiny_bert(trained_run, tmp_path_factory):
    """An untrained BERT beside the tiny run, with the same tokenizer."""
    tokenizer = load_run(trained_run, device="cpu").tokenizer
    config = BertBaselineConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=3
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "bert"
    BertBaselineForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_decoder(trained_run, tmp_path_factory):
    """An untrained Deep Delta decoder with the same tokenizer."""
    tokenizer = load_run(trained_run, device="cpu").tokenizer
    config = DDLConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=64
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "ddl"
    DDLForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def young_run(trained_run, tmp_path_factory):
    """A run that has begun to train and has no checkpoint yet."""
    folder = tmp_path_factory.mktemp("runs") / "young"
    folder.mkdir()
    shutil.copy(trained_run / "config.yaml", folder)
    lines = (trained_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))
    return folder


@pytest.fixture(scope="session")
def address(trained_run, tiny_bert, tiny_decoder, young_run, tmp_path_factory):
    """Where the page about these is served; one more model is broken."""
    pytest.importorskip("gradio", reason="the page needs the extra app")
    from pnn.explore.server import make_server

    broken = tmp_path_factory.mktemp("broken")
    (broken / "config.json").write_text('{"model_type": "pnn"}')
    server = make_server([str(trained_run), str(tiny_bert), str(tiny_decoder), str(young_run), str(broken)])
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def visit(chromium, address):
    """Open the page as a new user: `page = visit(width=390, color_scheme="dark")`. At the end no page may have logged an error
    or have asked another host for anything."""
    contexts, wrong = [], []

    def open_page(width=1366, height=850, **how):
        context = chromium.new_context(viewport={"width": width, "height": height}, **how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        wrong.append(complaints(page, address))
        page.goto(address)
        page.wait_for_selector(".refining")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not any(wrong), wrong
