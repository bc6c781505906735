"""The wheel as a new user has it: in an empty folder, in an environment of its own, with no checkout on the path. From the
installation to a head removed in the browser, with the seconds of each part.

    python release/try_wheel.py [FOLDER]        (`make wheel`; about ten minutes on two cores)

The browser is this machine's own Chromium, driven from here; what it visits is what was installed. It fails where a command
fails, where the page logs an error or asks another host for anything, and where removing a head changes nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build import main as build_packages
from dependencies import ROOT
from playwright.sync_api import Browser, Page, sync_playwright

TEXT = "the fox of avon wore amber hats . it has old [MASK] boots ."
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HEAD = "head 1 of refiner 0"
TAKEN: dict[str, float] = {}  # seconds by part


@contextmanager
def timed(part: str) -> Iterator[None]:
    print(f"== {part}", flush=True)
    begun = time.monotonic()
    yield
    TAKEN[part] = time.monotonic() - begun


def call(*words: str | Path, folder: Path) -> None:
    subprocess.run([str(word) for word in words], cwd=folder, env=clean(), check=True)


def clean() -> dict[str, str]:
    """Nothing of the checkout that this script runs in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def install(folder: Path) -> Path:
    """Returns the new environment's programs."""
    with timed("build the packages"):
        build_packages(folder / "dist")
    (wheel,) = (folder / "dist").glob("*.whl")
    programs = folder / "venv" / "bin"
    with timed("install the wheel with the extra app"):
        call(sys.executable, "-m", "venv", folder / "venv", folder=folder)
        call(programs / "pip", "install", "--quiet", f"{wheel}[app]", "-c", ROOT / "constraints.txt", folder=folder)
    return programs


def use(programs: Path, home: Path) -> None:
    """What the site's first page says, from training to the browser."""
    with timed("pnn doctor"):
        call(programs / "pnn", "doctor", folder=home)
        where = subprocess.check_output([programs / "python", "-c", "import pnn; print(pnn.__file__)"], cwd=home, env=clean())
        if not Path(where.decode().strip()).is_relative_to(programs.parent):
            sys.exit(f"this is not the installed package: {where.decode()}")
    with timed("pnn quickstart"):
        call(programs / "pnn", "quickstart", folder=home)
    with timed("pnn fill"):
        call(programs / "pnn", "fill", "runs/quickstart/pnn", TEXT, "--by-step", folder=home)
    with exploring(programs, home) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        smaller = remove_a_head(browser, address, home)
        browser.close()
    with timed("pnn fill, of the model that was downloaded"):
        call(programs / "pnn", "fill", smaller, TEXT, "--by-step", folder=home)


@contextmanager
def exploring(programs: Path, home: Path) -> Iterator[str]:
    """The page's address, as the command tells it."""
    command = [programs / "pnn", "explore", "--port", "0", "--no-browser"]
    with timed("pnn explore, until it says where the page is"):
        server = subprocess.Popen(command, cwd=home, env=clean(), stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = next((word for line in server.stdout for word in line.split() if word.startswith("http://")), None)
    if address is None:
        sys.exit(f"pnn explore ended with exit code {server.wait()}")
    try:
        yield address
    finally:
        server.terminate()
        server.wait(20)


def remove_a_head(browser: Browser, address: str, home: Path) -> Path:
    """By clicks; returns the smaller model's folder."""
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": 1366, "height": 850})
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((address, "data:", "blob:")) else wrong.append(asked.url))
    with timed("the page opens, with a text being rewritten"):
        page.goto(address)
        page.locator(".refining tr.masked").first.wait_for()
    with timed("Reorganise: a head is clicked away"):
        page.get_by_role("tab", name="Reorganise").click()
        page.get_by_role("button", name=HEAD, exact=True).click()
        page.get_by_role("button", name=f"{HEAD}, removed").wait_for()
        page.get_by_text("Download the smaller model").wait_for()
    with timed("Measure speed"):
        page.get_by_role("button", name="Measure speed").click()
        page.get_by_text("tokens per second").wait_for()
    compared = rows(page)
    for name, cells in compared.items():
        print(f"   {name}: {' | '.join(cells)}")
    if compared["perplexity"][-1] == "–" or compared["parameters"][-1] == "–" or wrong:
        sys.exit(f"the head made no difference, or the page complained: {wrong}")
    with timed("download the smaller model"), page.expect_download() as download:
        page.get_by_text("Download the smaller model").click()
    shutil.unpack_archive(download.value.path(), home / "smaller", "zip")
    return home / "smaller"


def rows(page: Page) -> dict[str, list[str]]:
    """The table of what was measured: as it was, now, change."""
    lines = page.locator(".comparison tbody tr").all()
    return {line.locator("th").inner_text(): line.locator("td").all_inner_texts() for line in lines}


def main(folder: Path) -> None:
    """`folder` is empty."""
    if CHROMIUM is None:
        sys.exit("there is no Chromium on this machine (Debian: apt install chromium)")
    home = folder / "home"
    home.mkdir()
    use(install(folder), home)
    print("\nseconds")
    for part, seconds in TAKEN.items():
        print(f"{seconds:8.1f}  {part}")
    print(f"{sum(TAKEN.values()):8.1f}  in all")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    if len(sys.argv) == 2:
        place = Path(sys.argv[1]).resolve()
        place.mkdir(parents=True)  # an empty folder: one that is there is not
        main(place)
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
