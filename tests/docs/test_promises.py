"""Every promise names a test, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_test_that_a_promise_names_exists():
    assert len(NAMED) > 40
    missing = [f"{file}::{name}" for file, name in NAMED if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert missing == []


def test_every_promise_names_a_test():
    sections = dict(part.split("\n", 1) for part in TEXT.split("\n## ")[1:])
    kept = {title: text for title, text in sections.items() if title != "What is not promised"}
    assert [title for title, text in kept.items() if "::test_" not in text] == []
    promised = [item for text in kept.values() for item in re.split(r"^- ", text, flags=re.M)[1:]]
    assert [item for item in promised if "::test_" not in item] == []


def test_how_to_report_is_said_without_names_or_addresses():
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in security
    assert not re.search(r"\S@\S|https?://", security)
