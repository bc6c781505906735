"""Takes the site's pictures of `pnn explore` anew, into docs/images/screens: after `make figures`, with Chromium installed.

.venv/bin/python docs/screens.py runs/site/runs/quickstart runs/site/runs/ddl_tiny
"""

from __future__ import annotations

import io
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from playwright.sync_api import Page, sync_playwright

from pnn.explore.server import make_server

SCREENS = Path(__file__).resolve().parent / "images" / "screens"


def refine(page: Page) -> None:
    page.get_by_label("Read after step").fill("2")
    page.locator(".refining tr.masked td.read").first.hover()


def rewrite(page: Page) -> None:
    page.locator(".rewriting tr.masked td").nth(4).hover()


def reorganise(page: Page) -> None:
    page.get_by_label("Model").last.click()
    page.get_by_role("option", name="bert").click()
    for head in ("head 1 of layer 0", "head 3 of layer 2"):
        page.get_by_role("button", name=head, exact=True).click()
        page.get_by_role("button", name=f"{head}, removed").wait_for()


def runs(page: Page) -> None:
    page.locator(".curves").first.wait_for()


# tab → what to do on it; each is one picture, "refine" also on a phone in the dark
TABS: dict[str, Any] = {"refine": refine, "rewrite": rewrite, "reorganise": reorganise, "runs": runs}


def only_refined(page: Page) -> None:
    page.locator(".refining").first.wait_for()


def serve(models: list[str]) -> str:
    server, listening = make_server(models), socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def trimmed(picture: Image.Image, margin: int = 24) -> Image.Image:
    """Without the empty rows at its end."""
    empty = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    used = ImageChops.difference(picture, empty).getbbox()
    return picture.crop((0, 0, picture.width, min(picture.height, used[3] + margin))) if used else picture


def main() -> None:
    address, box = serve(sys.argv[1:]), serve(["models/pnn-base"])
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        laptop, phone = {"width": 1366, "height": 600}, {"width": 390, "height": 1340}
        wanted = [(address, name, do, laptop, "light") for name, do in TABS.items()]
        wanted += [(address, "refine_phone", refine, phone, "dark"), (box, "refine_box", only_refined, laptop, "light")]
        for place, name, do, size, scheme in wanted:
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(place)
            page.get_by_role("tab", name=name.split("_")[0].capitalize()).click()
            do(page)
            page.wait_for_timeout(500)
            picture = Image.open(io.BytesIO(page.screenshot(full_page=size is laptop))).convert("RGB")  # a whole phone is long
            trimmed(picture).quantize(96).save(SCREENS / f"{name}.png", optimize=True)  # a third of the size
        browser.close()


if __name__ == "__main__":
    main()
