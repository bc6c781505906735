"""The site in a real Chromium: everybody can read it, it logs no error, and it asks no other host for anything."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import WCAG, axe_finds, complaints

ROOT = Path(__file__).parents[2]
# the first page, one with equations, one with code and a wide table, one with pictures; building all takes twice the time
PAGES = ["index", "ideas/pnn", "howto/huggingface", "howto/explore"]
LEFT_OUT = "\n".join(["*.py", "*.md", *(f"!/{page}.md" for page in PAGES)])


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where a site of these pages is served. (From the disk axe could not read the style sheets.)"""
    build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed (make docs)")
    for package in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is not installed (make docs)")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), exclude_docs=LEFT_OUT))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (390, "dark")])
def test_everybody_can_read_the_site(chromium, site, width, scheme):
    with chromium.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme) as context:
        page = context.new_page()
        wrong = complaints(page, site)
        for name in PAGES:
            page.goto(f"{site}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert axe_finds(page, WCAG) == [], name
        page.goto(f"{site}/index.html")
        page.get_by_label("Read after step").first.fill("1")  # the grids move without a server
        assert page.locator(".refining .reading mark").first.inner_text() == "black"
    assert wrong == []
