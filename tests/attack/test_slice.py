"""A little of every attack, by the command that makes the whole record; and what the attacks themselves stand on."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from counting import Tally, line
from damage import ODD, flip, spoil, spoil_json

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_a_slice_of_every_attack_finds_nothing():
    ended = subprocess.run([sys.executable, HERE / "run.py", "--slice", "--jobs", "1"], capture_output=True, text=True)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "0 tracebacks  0 hangs  0 differences  0 left" in ended.stdout.splitlines()[-1]


@pytest.mark.parametrize("number", range(50))
def test_damage_is_damage_and_the_same_for_the_same_seed(number):
    raw, value = b'{"a": [1, 2, {"b": "c"}]}', {"a": [1, 2, {"b": "c"}], "d": 0.5}
    assert spoil(raw, random.Random(number)) == spoil(raw, random.Random(number)) != raw
    flipped = flip(raw, random.Random(number))
    assert sum((a ^ b).bit_count() for a, b in zip(raw, flipped, strict=True)) == 1
    spoilt = spoil_json(value, random.Random(number))
    assert repr(spoilt) == repr(spoil_json(value, random.Random(number)))
    assert value == {"a": [1, 2, {"b": "c"}], "d": 0.5}
    assert spoilt in ODD or repr(spoilt) != repr(value)


def test_what_went_wrong_is_counted_and_kept():
    tally = Tally(cases=3)
    tally.count("refused")
    tally.count("hangs", "this one")
    assert (tally.failures, tally.wrong) == (1, ["hangs: this one"])
    assert "1 hangs" in line("x", tally)
