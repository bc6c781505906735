"""Ways in which a file can be wrong. All follow from a `random.Random`."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

# Values of the wrong kind, size or sign. Text that YAML and JSON read as something else is among them.
ODD: list[Any] = [None, True, 0, -1, 1, 3, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")]
ODD += ["", "x", "3", "1e-3", "nan", "null", "../x", "/dev/null", "\x00", "é\u202e\U0001f600", "a" * 300, [], [1], ["x"], {}]
ODD += [{"x": 1}, {"type": "pnn"}, [[]], [None], {"": None}]


def flip(raw: bytes, draw: random.Random) -> bytes:
    """One bit of it is another."""
    out = bytearray(raw)
    out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


def spoil(raw: bytes, draw: random.Random) -> bytes:
    """Flipped, cut short, with something in it, doubled in part, or something else altogether. Never as it was."""
    at = draw.randrange(len(raw) + 1)
    end = min(len(raw), at + draw.randrange(1, 64))
    odd = draw.choice([b"\x00", b"\xff\xfe", b"{", b"]", b"\n", b"NaN", b"\xed\xa0\x80", draw.randbytes(8)])
    ways = [raw[:at], raw[:at] + odd + raw[at:], raw[:at] + raw[end:], raw[:end] + raw[at:], b"", draw.randbytes(40), odd]
    ways += [flip(raw, draw)] * 3 if raw else []
    ways = [way for way in ways if way != raw]
    return draw.choice(ways)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in list(inside)[:60] for found in places(one, (*path, key)))]


def spoil_json(value: Any, draw: random.Random) -> Any:
    """The value with one or two of its parts gone, of another kind, or under another name."""
    out = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2))):
        *way, last = draw.choice(places(out)[1:] or [()]) or (None,)
        if last is None or draw.random() < 0.03:
            return draw.choice(ODD)
        parent = out
        for key in way:
            parent = parent[key]
        change = draw.randrange(4)
        if change == 0:
            del parent[last]
        elif change == 1 and isinstance(parent, dict):
            parent[f"{last}_"] = parent.pop(last)
        elif change == 2 and isinstance(parent[last], int | float):
            parent[last] = draw.choice([-parent[last], parent[last] + 1, parent[last] * 10**6, str(parent[last])])
        else:
            parent[last] = draw.choice(ODD)
    return out


def spoil_file(path: Path, draw: random.Random) -> str:
    """Change a file for the worse; returns how, in words."""
    raw = path.read_bytes()
    if draw.random() < 0.08:
        path.unlink()
        return f"{path.name} removed"
    if path.suffix == ".json" and draw.random() < 0.7:
        changed = json.dumps(spoil_json(json.loads(raw), draw)).encode()
        path.write_bytes(changed)
        return f"{path.name} with other values"
    path.write_bytes(spoil(raw, draw))
    return f"{path.name} with other bytes"
