"""LLM-Pruner's recipe of results/shrink/peers removes what it is said to remove, and the collecting tells who is ahead."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from pnn.files import write_json
from pnn.plasticity.lora import low_rank
from pnn.plasticity.units import masked, unit_map

FOLDER = Path(__file__).parents[1] / "results" / "shrink" / "peers"
SCRIPTS = ("recipes", "collect")


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in SCRIPTS:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in SCRIPTS}
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "bos_token_id": None, "eos_token_id": None}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part, "labels": part} for part in ids.split(2)]


def worth_of_neuron(model, batches, layer, neuron):
    """Σ |w · ∂L/∂w| of its two rows and its column, by autograd's own gradients of the mean over all rows."""
    model.zero_grad()
    ids = torch.cat([batch["input_ids"] for batch in batches])
    model(input_ids=ids, labels=ids).loss.backward()
    mlp = model.model.layers[layer].mlp
    rows = [(one.weight[neuron], one.weight.grad[neuron]) for one in (mlp.gate_proj, mlp.up_proj)]
    column = (mlp.down_proj.weight[:, neuron], mlp.down_proj.weight.grad[:, neuron])
    total = sum(float((weight.detach() * slope).abs().sum()) for weight, slope in (*rows, column))
    model.zero_grad()
    return total


def test_llm_pruners_recipe_takes_the_least_worth_of_the_layers_between(scripts, model, batches):
    recipes = scripts["recipes"]
    worth = recipes.taylor_of_groups(model, batches)
    assert float(worth["neuron", 1][7]) == pytest.approx(worth_of_neuron(model, batches, 1, 7), rel=1e-4)
    assert [len(worth["head", layer]) for layer in range(4)] == [3] * 4  # a group of queries with its key and value
    gone = recipes.chosen_by_llm_pruner(model, worth, 0.2)
    assert {unit.layer for unit in gone} == {1, 2}  # neither the first layer nor the last
    for kind in ("head", "neuron"):
        for layer in (1, 2):
            lost = {unit.index for unit in gone if (unit.kind, unit.layer) == (kind, layer)}
            values = worth[kind, layer]
            assert 0 < len(lost) < len(values)
            assert max(values[at] for at in lost) <= min(values[at] for at in range(len(values)) if at not in lost)
    small = recipes.llm_pruner(model, batches, 0.2)
    assert recipes.count(small) == pytest.approx(0.8 * recipes.count(model), rel=recipes.CLOSE)
    assert len(unit_map(small, "head")[0]) == 3
    ids = batches[0]["input_ids"]
    with torch.no_grad(), masked(model, gone):
        expected = model(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_what_layers_between_cannot_give_is_said(scripts, model, batches):
    with pytest.raises(scripts["recipes"].UserError, match="leaves 2 layers alone"):
        scripts["recipes"].llm_pruner(model, batches, 0.6)


def test_adapters_are_merged_into_the_model(scripts, model, batches):
    pytest.importorskip("peft")
    small, ids = scripts["recipes"].llm_pruner(model, batches, 0.2), batches[0]["input_ids"]
    names = [name for name, _ in small.named_parameters()]
    with low_rank(small, 8), torch.no_grad():
        learnt = {name for name, parameter in small.named_parameters() if parameter.requires_grad}
        assert learnt
        assert all("lora" in name for name in learnt)
        for parameter in (parameter for parameter in small.parameters() if parameter.requires_grad):
            parameter.add_(0.1)
        inside = small(ids).logits
    assert [name for name, _ in small.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in small.parameters())
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, inside, atol=1e-5, rtol=1e-5)


def test_collecting_tells_who_is_ahead(scripts, tmp_path):
    """Planted: ours a nat above the unpruned model, one peer two, one half a nat, one level but noisy."""
    collect = scripts["collect"]
    targets = [10] * 12
    noise = [(-1) ** at * 3.0 for at in range(12)]

    def planted(name, nats, **more):
        write_json(tmp_path / f"{name}.json", {"nats": nats, "targets": targets, **more})

    def above(per_token, wobble=0.1):
        return [20.0 + 10 * per_token + wobble * one for one in noise]

    size = {"parameters": 80, "flops_per_token": 1.0, "seconds": 1.0, "shape": {}}
    write_json(tmp_path / "settings.json", {})
    planted("unpruned", above(0), parameters=100)
    for arm, loss in (("ours", 1.0), ("llm_pruner", 2.0), ("tp_width", 0.5)):
        planted(f"20-0-{arm}", above(loss), **size)
        planted(f"20-0-{arm}-teacher", above(loss / 2, wobble=0.1), seconds=1.0)
    planted("20-0-tp_taylor", above(1.0, wobble=1.0), **size)
    planted("20-0-unpruned-text", above(0), seconds=1.0)
    planted("20-0-ours_width", above(0.7), **size)
    write_json(
        tmp_path / "20-0-speed.json",
        {"reading": {"tokens_per_second": {"unpruned": 2, "ours": 3}}, "writing": {"unpruned": 2, "ours": 4}},
    )
    later = {"unpruned": 4, "ours_width": 5}  # another run on a faster day
    write_json(tmp_path / "20-0-speed-ours_width.json", {"reading": {"tokens_per_second": later}, "writing": later})
    found = collect.collected(tmp_path)
    assert found["20"]["speed"]["ours"] == {"reading": 1.5, "writing": 2.0}
    assert found["20"]["speed"]["ours_width"] == {"reading": 1.25, "writing": 1.25}
    assert found["20"]["worth_of_width"]["pruned"]["ahead_by"]["value"] == pytest.approx(0.3)
    assert found["20"]["ours_with_width_ahead"]["pruned"]["tp_width"]["verdict"] == "not supported"
    assert "| ours | supported, +0.30" in collect.with_width(found["20"])
    told = {peer: one["verdict"] for peer, one in found["20"]["ours_ahead"]["pruned"].items()}
    assert told == {"llm_pruner": "supported", "tp_width": "not supported", "tp_taylor": "undecided"}
    assert found["20"]["ours_ahead"]["pruned"]["llm_pruner"]["ahead_by"]["value"] == pytest.approx(1.0)
    assert found["20"]["perplexity_above_control"]["value"] == pytest.approx(2.718281828**0.5 - 1, rel=1e-6)
    assert found["20"]["ours_ahead"]["text"] == {}
    said = collect.answer({"tiny": found})
    assert (
        "right after pruning ahead of LLM-Pruner's recipe and behind Torch-Pruning with width and not to be told from" in said
    )
    shutil.copy(tmp_path / "20-0-llm_pruner.json", tmp_path / "20-1-llm_pruner.json")  # a seed that ours does not have
    assert "llm_pruner" not in collect.collected(tmp_path)["20"]["ours_ahead"]["pruned"]
