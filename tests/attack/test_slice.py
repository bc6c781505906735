"""A little of every attack, by the command that makes the whole record; and what the attacks themselves stand on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from counting import Tally, line
from damage import ODD, flip, spoil, spoil_json

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_a_slice_of_every_attack_finds_nothing(start_pnn, tmp_path):
    """In a forked process: `make attack` starts a new one, the attacks are the same."""
    script = tmp_path / "attack.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"  # as Python does
        f"runpy.run_path({str(HERE / 'run.py')!r}, run_name='__main__')\n"
    )
    attack = start_pnn("--slice", "--jobs", "1", script=script)
    assert attack.wait(600) == 0, attack.output()
    (everything,) = [said for said in attack.output().splitlines() if said.startswith("all ")]
    assert "0 tracebacks  0 hangs  0 differences  0 left" in everything


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
