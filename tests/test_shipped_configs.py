"""Every shipped config is what its name says: counted on a model that is built, without memory, on the meta device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from pnn.config import load_config, shipped_configs
from pnn.models.sections import build_model, model_config

EQUATIONS = 53_704_251
REFINER = 6_692_097
WIDTH, VOCABULARY = 768, 30522
# name → what differs from the paper's equations, parameters at BERT's vocabulary
PAPER_SIZE = {
    "pnn_wikitext103": ({}, EQUATIONS),
    "paper_reproduction": (
        {"delta_norm": True, "gate_bias": True, "zero_init": False, "attention_dropout": 0.1},
        EQUATIONS + 2 * WIDTH + 2 * WIDTH,  # the norm's, the gate's biases
    ),
    "ablation_no_gate": ({"gate": "none"}, EQUATIONS - 2 * WIDTH**2 - 1),
    **{f"ablation_steps_{n}": ({"num_steps": n, "schedule": [0] * n}, EQUATIONS) for n in (2, 6, 8)},
    **{
        # a column of the one matrix with its bias, and a row of the other
        f"ablation_ffn_{n}": ({"intermediate_size": n}, EQUATIONS + (n - 2048) * (2 * WIDTH + 1))
        for n in (1024, 4096)
    },
    "ablation_tied_head": (
        {"tie_word_embeddings": True, "head_transform": True},
        EQUATIONS - VOCABULARY * WIDTH + WIDTH**2 + 3 * WIDTH,  # less a matrix, and a dense layer with its norm more
    ),
    "ablation_four_refiners": ({"schedule": [0, 1, 2, 3]}, EQUATIONS + 3 * REFINER),
    "ablation_four_refiners_twice": ({"schedule": [0, 1, 2, 3] * 2, "num_steps": 8}, EQUATIONS + 3 * REFINER),
}


def built(name):
    with torch.device("meta"):
        return build_model(model_config(load_config(name).model, vocab_size=VOCABULARY, max_position_embeddings=128))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_every_ablation_is_counted_here():
    assert {name for name in shipped_configs() if name.startswith("ablation_")} <= set(PAPER_SIZE) <= set(shipped_configs())
    assert parameters(built("bert_baseline")) == 132_066_618


@pytest.mark.parametrize("name", PAPER_SIZE)
def test_a_row_differs_from_the_papers_equations_in_what_its_name_says_and_in_nothing_else(name):
    changes, expected = PAPER_SIZE[name]
    model = built(name)
    assert parameters(model) == expected
    plain = built("pnn_wikitext103").config.to_dict()
    assert {key for key, value in model.config.to_dict().items() if value != plain[key]} == set(changes)
    assert {key: getattr(model.config, key) for key in changes} == changes


@pytest.mark.parametrize("name", [*PAPER_SIZE, "bert_baseline"])
def test_text_and_recipe_are_the_same_for_all(name):
    config, paper = load_config(name), load_config("pnn_wikitext103")
    for section in ("data", "training", "evaluation"):
        assert dataclasses.asdict(getattr(config, section)) == dataclasses.asdict(getattr(paper, section))


@pytest.mark.parametrize("name", [*PAPER_SIZE, "bert_baseline"])
def test_a_count_in_a_configs_comments_is_its_count(name):
    said = re.findall(r"\d{2,3}(?:,\d{3}){2}", shipped_configs()[name].read_text(encoding="utf-8"))
    assert [int(number.replace(",", "")) for number in said] == [parameters(built(name))] * len(said)


# Where the rates of a family were found
BASES = {"pnn": "pnn_wikitext103", "pnn_causal": "pnn_causal_small", "ddl": "ddl_small", "gpt2": "gpt2_small"}
# Every preset by size: parameters, and the width that its rate was found at
PRESETS = {
    "pnn_100m": (104_762_688, 768),
    "pnn_350m": (343_601_989, 768),
    "pnn_1b": (1_021_427_022, 768),
    "ddl_small": (123_734_956, None),
    "ddl_medium": (353_873_236, None),
    "ddl_1b": (1_015_635_028, 768),
    "pnn_causal_tiny": (58_433, None),
    "pnn_causal_mini": (24_691_203, None),
    "pnn_causal_small": (67_036_804, None),
    "pnn_causal_100m": (101_948_548, 768),
    "pnn_causal_350m": (360_635_530, 768),
    "pnn_causal_1b": (1_009_525_906, 768),
    "gpt2_small": (124_439_808, None),
    "gpt2_medium": (354_823_168, 768),
    "gpt2_1b": (1_017_302_272, 768),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_as_large_as_it_says(name):
    expected, base = PRESETS[name]
    config = load_config(name)
    with torch.device("meta"):
        model = build_model(model_config(config.model, max_position_embeddings=config.data.max_length))
    assert parameters(model) == expected
    assert config.training.base_width == base
    assert f"{expected:,}" in shipped_configs()[name].read_text(encoding="utf-8")
    if base is not None:  # heads keep their size, and matrices begin as at the base
        small = model_config(load_config(BASES[name.rpartition("_")[0]]).model)
        width, heads = model.config.hidden_size, model.config.num_attention_heads
        assert width // heads == small.hidden_size // small.num_attention_heads
        if not name.startswith("ddl"):
            assert model.config.initializer_range == pytest.approx(0.02 * (base / width) ** 0.5, abs=5e-5)


def test_the_arms_of_hybrids_are_equal_in_what_their_table_says():
    folder = Path(__file__).parents[1] / "results" / "hybrids"
    text = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| \[`(\w+)`\]\(configs/\1\.yaml\) \| [^|]* \| (\d+) \| (\d+) \|", text)
    assert {name for name, *_ in rows} == {path.stem for path in (folder / "configs").glob("*.yaml")} - {"recipe"}
    counts = {}
    for name, refiners, steps in rows:
        config = model_config(load_config(str(folder / "configs" / f"{name}.yaml")).model, vocab_size=100)
        assert (config.num_refiners, config.num_steps) == (int(refiners), int(steps))
        with torch.device("meta"):
            counts[name] = parameters(build_model(config))
    # those with one attention are equal to within 0.3 %: test_hybrids
    four = {name: counts[name] for name, refiners, _ in rows if refiners == "4" and not name.endswith("_one_attention")}
    added = {"looped_learned_recall": 4, "looped_guess": 1, "looped_again": 5}  # learned numbers for each dimension
    assert {name: more - four["looped"] for name, more in four.items()} == {name: 64 * added.get(name, 0) for name in four}
    assert counts["one"] < four["looped"] < counts["eight"]


@pytest.mark.parametrize("path", ["more_steps/configs/gated_random", "more_steps/configs/rewrite_fixed", "widths/configs/w768"])
def test_other_results_configs_build(path):
    config = load_config(str(Path(__file__).parents[1] / "results" / f"{path}.yaml"))
    with torch.device("meta"):
        assert parameters(build_model(model_config(config.model, vocab_size=100))) > 0
