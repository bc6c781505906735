"""What tests ask of a page in a real Chromium (the fixture `chromium`)."""

from __future__ import annotations

from typing import Any

import pytest

WCAG = ("serious", "critical")


def complaints(page: Any, own: str) -> list[str]:
    """Filled while the page lives: errors that it logs, and what it asks of others than `own`, where it comes from."""
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith((own, "data:", "blob:")) else wrong.append(asked.url))
    return wrong


def axe_finds(page: Any, impacts: tuple[str, ...] | None = None) -> list[tuple[str, str]]:
    """Rules that the page breaks (those of these impacts), each with the first place."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if impacts is None or one["impact"] in impacts]
