"""The stream of results/plastic_stream: its controller learns, its arms read the same rows, and forgetting is what it says."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from pnn.errors import UserError
from pnn.files import write_json
from pnn.plasticity import Text
from pnn.stats import NOT_SUPPORTED, SUPPORTED, UNDECIDED

FOLDER = Path(__file__).parents[1] / "results" / "plastic_stream"
NAMES = ("stream", "run", "collect")


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def stream(scripts):
    return scripts["stream"]


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=60, n_embd=24, n_head=4, n_layer=3, n_positions=16, bos_token_id=None, eos_token_id=None)
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randint(first, 60, (20, 12), generator=generator) for name, first in (("one", 10), ("other", 40))}
    return hf.GPT2LMHeadModel(config).eval(), {name: Text(ids[:12], ids[12:]) for name, ids in rows.items()}


@pytest.mark.parametrize("planted", range(6))
def test_the_controller_finds_the_best_choice_where_domains_differ_more_than_choices(stream, planted):
    best = stream.GRID[planted]
    controller, draw = stream.Controller(stream.GRID), random.Random(0)
    chosen = []
    for number in range(60):
        loss = (2.0, 7.0, 4.0)[number % 3]
        choice = controller.choose(loss)
        chosen.append(choice)
        likeness = 0.1 * (choice.share == best.share) + 0.1 * (choice.rate == best.rate)
        likeness += 0.1 * (choice.score == best.score) if best.share and choice.share else 0.0
        controller.see(0.2 * loss + likeness + draw.gauss(0, 0.02))
    assert chosen[40:].count(best) >= 16


def test_arms_read_the_same_rows_and_a_round_keeps_its_heads(stream, tiny, monkeypatch):
    model, domains = tiny
    plan = stream.Plan(passes=2, updates=2, batch_rows=2, score_rows=2, seen_rows=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    read: list[list[int]] = []
    for_update = Text.for_update

    def watched(text, *args):
        batch = for_update(text, *args)
        read.append(batch["input_ids"].flatten().tolist())
        return batch

    monkeypatch.setattr(Text, "for_update", watched)
    found, rows = {}, {}
    for choice in stream.GRID[::2]:
        for grows in (True, False):
            read.clear()
            found[choice, grows] = stream.play(model, domains, stream.Always(choice), plan, seed=3, grows=grows)
            rows[choice, grows] = [*read]
    assert len({str(one) for one in rows.values()}) == 1
    first = next(iter(rows.values()))
    assert len(first) == 8 == len({str(batch) for batch in first})  # a second visit reads on
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for (choice, grows), record in found.items():
        left = [12] * 4 if grows or not choice.share else [11, 10, 9, 9]  # ⌊0.1 · 9⌋ is none
        assert [one["heads"] for one in record["rounds"]] == left
    losses = {record["rounds"][-1]["losses"]["one"] for (_, grows), record in found.items() if grows}
    assert len(losses) == 3


def test_a_controllers_gain_is_measured_on_rows_that_no_result_is_measured_on(stream, tiny):
    model, domains = tiny
    plan = stream.Plan(seen_rows=2)
    result, controller = stream._losses(model, domains, plan)
    for name, text in domains.items():
        for found, rows in ((result, text.held_out[2:]), (controller, text.held_out[:2])):
            with torch.no_grad():
                assert found[name] == pytest.approx(float(model(input_ids=rows, labels=rows).loss), rel=1e-5)


def test_measures(stream):
    rounds = [
        {"domain": "a", "losses": {"a": 2.0, "b": 9.0}},
        {"domain": "b", "losses": {"a": 3.0, "b": 5.0}},  # a: +1
        {"domain": "a", "losses": {"a": 2.5, "b": 5.5}},  # b: +0.5
        {"domain": "b", "losses": {"a": 2.6, "b": 4.0}},  # a: +0.1, since its last round
    ]
    record = {"rounds": rounds}
    assert stream.adaptation(record) == pytest.approx((2.0 + 5.0 + 2.5 + 4.0) / 4)
    assert stream.forgetting(record) == pytest.approx((1 + 0.5 + 0.1) / 3)
    assert stream.overall(record) == pytest.approx((2.0 + 4.0 + 4.0 + 3.3) / 4)


def test_a_cut_vocabulary_gives_the_same_logits_for_the_tokens_that_stay(stream, tiny):
    model, domains = tiny
    cut, texts = stream.cut_vocabulary(model, domains)
    assert cut.config.vocab_size < model.config.vocab_size
    kept = torch.cat([rows.flatten() for text in domains.values() for rows in (text.train, text.held_out)]).unique()
    for name, text in domains.items():
        with torch.no_grad():
            whole, smaller = model(text.held_out).logits, cut(texts[name].held_out).logits
        assert torch.allclose(whole[..., kept], smaller, atol=1e-5)


def test_verdicts_are_paired_by_seed_and_the_best_choice_is_each_seeds_own(scripts, tmp_path):
    collect, stream = scripts["collect"], scripts["stream"]
    level = dict.fromkeys(scripts["run"].ARMS, 0.5)  # above what a seed's rows cost
    level |= {str(stream.PLAIN[stream.RATES[0]]): 0.1, str(stream.CYCLES[stream.RATES[0]]): 0.0, "controller": 0.01}
    for number, (arm, above) in enumerate(level.items()):
        for seed in range(3):
            jitter = 0.0002 * seed * number
            losses = [{"a": 3.0 + seed + above + jitter, "b": 4.0 + seed + above + jitter}] * 2
            rounds = [{"domain": name, "losses": of} for name, of in zip("ab", losses, strict=True)]
            write_json(tmp_path / f"{number}-{seed}.json", {"arm": arm, "seed": seed, "plan": {}, "rounds": rounds})
    found = collect.findings(collect.read(tmp_path)[0])
    verdicts = {name: one["verdict"] for name, one in found.items()}
    low, high = (f"overall {rate:g}" for rate in stream.RATES)
    assert (verdicts[low], verdicts[high]) == (SUPPORTED, UNDECIDED)  # by 0.1 in each seed; by jitter alone
    assert found[low]["effect"]["value"] == pytest.approx(0.1, abs=0.01)
    assert (verdicts["learning"], verdicts["near"], verdicts["ahead"]) == (SUPPORTED, SUPPORTED, NOT_SUPPORTED)
    (tmp_path / "0-2.json").unlink()
    with pytest.raises(UserError, match="lacks some arms"):
        collect.read(tmp_path)
