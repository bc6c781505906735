"""The cycle improves a model and keeps complete records."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import transformers as hf
from beside import STORIES
from small_cycles import SHORT, records_of, same_weights

from pnn.data.masking import SpecialTokens
from pnn.errors import UserError
from pnn.models.loading import load_any
from pnn.plasticity import CycleSettings, Text, cycle, heads, load, prune
from pnn.plasticity.heads import head_map
from pnn.plasticity.settings import check
from pnn.runs import read_json

FIELDS = {
    "initial": {"model_name", "total_heads", "active_heads", "perplexity", "head_map", "parameters", "flops_per_token"},
    "pruning": {
        "pruning_level",
        "pruning_strategy",
        "heads_pruned",
        "active_heads_after_pruning",
        "pruned_heads",
        "scores",
    },
    "measurement": {"cycle", "pruned_perplexity", "perplexity_change", "perplexity_change_percent", "missing_capacity"},
    "growth": {"growth_strategy", "growth_percentage", "heads_added", "active_heads_after_growth", "added_heads", "perplexity"},
    "training": {"step", "train_loss"},
    "evaluation": {"step", "perplexity", "sample"},
    "final": {
        "cycle",
        "final_perplexity",
        "active_heads",
        "active_heads_percentage",
        "perplexity_change_from_initial",
        "perplexity_change_from_initial_percent",
        "perplexity_recovery",
        "recovery",
    },
}


@pytest.mark.parametrize("kind", ["gpt2", "ddl"])
def test_a_cycle_improves_and_says_what_it_did(kind, model_of, text, tokenizer, tmp_path):
    model = model_of(kind)
    before = copy.deepcopy(model)
    result = cycle(model, text, tmp_path / "run", SHORT, tokenizer=tokenizer, name="tiny")
    assert same_weights(model, before)
    assert not hasattr(model.config, "head_map") or model.config.head_map is None
    records = records_of(tmp_path / "run")
    by_phase = {phase: [one for one in records if one["phase"] == phase] for phase in FIELDS}
    for phase, wanted in FIELDS.items():
        for record in by_phase[phase]:
            assert wanted <= record.keys(), phase
    assert [len(by_phase[phase]) for phase in FIELDS] == [1, 1, 1, 1, SHORT.learn_steps, 3, 1]
    initial, pruned, grown, final = (by_phase[phase][0] for phase in ("initial", "measurement", "growth", "final"))
    assert final["perplexity"] < 0.9 * min(pruned["perplexity"], initial["perplexity"])
    for field, of, whole in (("recovery", "loss", 1), ("perplexity_recovery", "perplexity", 100)):
        cost = pruned[of] - initial[of]
        assert final[field] == pytest.approx(whole * (pruned[of] - final[of]) / cost if cost > 0 else 0.0)
    assert grown["perplexity"] == pytest.approx(pruned["perplexity"], rel=1e-5)  # new heads start at zero
    assert by_phase["evaluation"][-1]["perplexity"] == final["perplexity"]
    assert all(isinstance(one["sample"], str) and one["sample"] for one in by_phase["evaluation"])
    # 12 heads: 3 go, 1 grows
    assert (initial["total_heads"], by_phase["pruning"][0]["heads_pruned"], grown["heads_added"]) == (12, 3, 1)
    assert final["active_heads"] == len(heads(result)) == 10
    assert final["head_map"] == head_map(result) == grown["head_map"]
    assert final["parameters"] == sum(p.numel() for p in result.parameters()) < initial["parameters"]
    summary = read_json(tmp_path / "run/summary.json")
    named = "experiment_name model_name dataset held_out cycles strategies timestamp settings speed"
    assert summary.keys() >= set(named.split())
    assert (summary["final_perplexity"], summary["final_active_heads"]) == (final["perplexity"], 10)
    assert summary["fewer_heads"] == pytest.approx(2 / 12)
    assert same_weights(load(tmp_path / "run/checkpoints/last"), result)
    assert same_weights(load_any(tmp_path / "run").model, result)  # the folder is a RUN for every command


@pytest.mark.parametrize("kind", ["bert", "pnn"])
def test_encoders_too(kind, model_of, rows, tokenizer, tmp_path):
    special = SpecialTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids))
    cycle(model_of(kind), Text(rows[:-16], rows[-16:], special), tmp_path / "run", SHORT, tokenizer=tokenizer)
    records = records_of(tmp_path / "run")
    assert records[-1]["perplexity"] < records[0]["perplexity"]
    assert all(one["sample"] is None for one in records if one["phase"] == "evaluation")


@pytest.mark.parametrize(
    "changes",
    [
        {"prune_by": "entropy", "grow_by": "entropy_gap", "per_layer": True},
        {"prune_by": "magnitude", "grow_by": "balanced", "init": "clone"},
        {"prune_by": "contribution", "grow_by": "importance"},
        {"prune_by": "combined", "grow_by": "random", "whole_layers": True, "prune": 0.9},
        {"prune": 0.0, "grow": 0.0},
        {"prune": 0.0, "grow": 0.3, "beyond": 1},
        {"learn_steps": 0},
    ],
)
def test_strategies_and_controls(changes, model_of, text, tmp_path):
    settings = CycleSettings(**{**vars(SHORT), "learn_steps": 2, **changes})
    result = cycle(model_of("gpt2"), text, tmp_path / "run", settings)
    pruned, grown = math.floor(12 * settings.prune + 1e-9), math.floor(12 * settings.grow + 1e-9)
    assert len(heads(result)) == 12 - pruned + grown


def test_rounds_and_a_second_cycle_on_what_was_saved(model_of, text, tmp_path):
    settings = CycleSettings(**{**vars(SHORT), "rounds": 2, "learn_steps": 4})
    cycle(model_of("gpt2"), text, tmp_path / "two", settings)
    finals = [one for one in records_of(tmp_path / "two") if one["phase"] == "final"]
    assert [one["cycle"] for one in finals] == [1, 2]
    assert [one["active_heads"] for one in finals] == [10, 8]  # 12 − 3 + 1, 10 − 3 + 1
    assert sorted(path.name for path in (tmp_path / "two/checkpoints").iterdir()) == ["last", "round-2-learned"]
    third = cycle(load(tmp_path / "two/checkpoints/last"), text, tmp_path / "three", SHORT)
    records = records_of(tmp_path / "three")
    assert (records[0]["active_heads"], records[0]["total_heads"]) == (8, 12)
    assert len(heads(third)) == 8 - 2 + 1
    assert records[-1]["perplexity"] < records[0]["perplexity"]


def test_a_later_round_without_room_is_told_before_the_first(model_of):
    smaller = prune(model_of("gpt2"), [(0, 1), (1, 1), (2, 1)])
    check(smaller, CycleSettings(prune=0.0, grow=0.17, rounds=1))  # two of three places
    with pytest.raises(UserError, match=r"^round 2: growing 0\.17 of 12 heads adds 2, but there is room for 1"):
        check(smaller, CycleSettings(prune=0.0, grow=0.17, rounds=2))
    check(smaller, CycleSettings(prune=0.0, grow=0.17, rounds=2, beyond=1))


def stories(folder: Path, count: int, length: int) -> str:
    """What the model itself writes: text that it knows as well as anything can be known."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = torch.full((count, 1), tokenizer.bos_token_id)
        made = model.generate(start, do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=tokenizer.eos_token_id)
    return "\n\n".join(" ".join(one.split()) for one in tokenizer.batch_decode(made, skip_special_tokens=True))


@pytest.mark.slow
def test_a_cycle_of_a_pretrained_model(pnn_command, tmp_path, monkeypatch):
    if not STORIES.exists():
        pytest.skip(f"no {STORIES}")
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text(stories(STORIES, 24, 96))
    settings = ("--max-length", 64, "--batch-size", 4, "--learn-steps", 4, "--evaluate-every", 4)
    code, _, err = pnn_command("plasticity", "cycle", STORIES, "--data", "stories.txt", "--output", "stories", *settings)
    assert code == 0, err
    records = records_of(Path("stories"))
    pruned, final = (next(one for one in records if one["phase"] == phase) for phase in ("measurement", "final"))
    assert (records[0]["heads"], pruned["heads"], final["heads"]) == (36, 26, 29)  # ⌊0.3 · 36⌋ go, ⌊0.1 · 36⌋ grow
    assert records[0]["perplexity"] < final["perplexity"] < pruned["perplexity"]
    assert final["parameters"] == records[0]["parameters"] - 7 * 4 * 288 * 48
    assert next(load("stories/checkpoints/last").parameters()).dtype == torch.float32
