"""The width of models with RMSNorm: dimensions of the state that are removed are as if masked, in every way that counts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import ENCODERS, GROUPED, LLAMA
from small_cycles import LENGTH, language

from pnn.errors import UserError
from pnn.plasticity import Unit, grow, heads, load, masked, prune, save, unit_map
from pnn.plasticity.architectures import ALL_KINDS, ARCHITECTURES, WIDTH, Llama
from pnn.plasticity.budget import Portion, faster, fewer_parameters, group_of, share_out
from pnn.plasticity.measure import size
from pnn.plasticity.repair import output_errors, repair
from pnn.plasticity.scores import mean_loss, prepared
from pnn.plasticity.shrink import ShrinkSettings, check
from pnn.plasticity.unit_scores import score_units
from pnn.plasticity.units import gated, parameters_by_dimension, parameters_of

RMS = ("llama", "mistral", "qwen2")
THIN = [Unit(WIDTH, 0, index) for index in (0, 3, 4, 11, 20, 21, 22, 30, 40, 47)]
SOME = [*THIN, Unit("layer", 0, 0), Unit("neuron", 1, 0), Unit("neuron", 2, 3), Unit("head", 2, 1)]
GENERATION = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=[*RMS, "tied, biases, a large epsilon"])
def wide(request, built):
    if request.param in RMS:
        return built(request.param)
    torch.manual_seed(5)
    config = hf.LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rms_norm_eps=0.3)
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def numbers(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("gone", [THIN, SOME, [Unit(WIDTH, 0, index) for index in range(30)]])
def test_removed_is_masked(wide, logits, gone):
    with masked(wide, gone):
        expected = logits(wide)
    assert (logits(prune(wide, gone)) - expected).abs().max() < 1e-5
    assert (logits(wide) - expected).abs().max() > 1e-2


def test_in_several_goes_and_with_a_layer_that_has_no_heads(wide, logits):
    headless = [(1, index) for index in unit_map(wide, "head")[1]]
    with masked(wide, [*SOME, *headless]):
        expected = logits(wide)
    pruned = prune(prune(prune(wide, SOME[:4]), [*SOME[6:], *headless], whole_layers=True), SOME[4:6])
    assert (logits(pruned) - expected).abs().max() < 1e-5
    assert unit_map(pruned, WIDTH) == [[index for index in range(48) if Unit(WIDTH, 0, index) not in THIN]]
    regrown = grow(pruned, [(1, 0)])  # a head grows in the width that is left
    assert (1, 0) in heads(regrown)
    assert torch.allclose(logits(regrown), logits(pruned), atol=1e-6)


def test_gradients_are_those_of_the_masked_model(wide, texts):
    batch = texts(wide)[0]
    pruned, full = prune(wide, SOME), copy.deepcopy(wide)
    pruned(**batch).loss.backward()
    with masked(full, SOME):
        full(**batch).loss.backward()
    kept = unit_map(pruned, WIDTH)[0]
    ours, theirs = pruned.base_model.layers[1], full.base_model.layers[1]
    gained = theirs.mlp.up_proj.weight.grad[1:, kept]  # without neuron 0
    assert (ours.mlp.up_proj.weight.grad - gained).abs().max() < 1e-5
    assert gained.abs().max() > 1e-4
    stretch = (len(kept) / 48) ** 0.5  # the norms' weights are larger by its inverse
    norm = theirs.input_layernorm.weight.grad[kept]
    assert (ours.input_layernorm.weight.grad - stretch * norm).abs().max() < 1e-5


def test_a_saved_model_comes_back_the_same(wide, logits, tmp_path):
    changed = prune(wide, SOME)
    save(changed, tmp_path / "model")
    back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(back), logits(changed))
    assert unit_map(back, WIDTH) == unit_map(changed, WIDTH)
    words = (back.get_input_embeddings().weight, back.get_output_embeddings().weight)
    assert (words[0] is words[1]) == wide.config.tie_word_embeddings
    assert numbers(back) == numbers(changed)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["width_map"] == "1-2 5-10 12-19 23-29 31-39 41-46"
    again = prune(load(tmp_path / "model"), [Unit(WIDTH, 0, 1)])
    with masked(wide, [*SOME, Unit(WIDTH, 0, 1)]):
        assert (logits(again) - logits(wide)).abs().max() < 1e-5
    assert size(back, 8)["flops_per_token"] < size(wide, 8)["flops_per_token"]
    labels = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3, pad_token_id=0)
    assert labels(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3)


def test_greedy_text_is_the_same_cached_and_not_and_masked(wide):
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(3))
    pruned, mask = prune(wide, SOME), torch.ones_like(ids)
    text = pruned.generate(ids, attention_mask=mask, **GENERATION)
    assert torch.equal(text, pruned.generate(ids, attention_mask=mask, use_cache=False, **GENERATION))
    with masked(wide, SOME):
        assert torch.equal(text, wide.generate(ids, attention_mask=mask, **GENERATION))


def test_the_input_stays_as_it_was(wide):
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    config = wide.config.to_dict()
    prune(wide, SOME)
    assert all(torch.equal(value, before[name]) for name, value in wide.state_dict().items())
    assert wide.config.to_dict() == config


# Scores, budget, repair -----------------------------------------------------------------------------------------------


def test_scores_of_dimensions(built, texts):
    model = built("qwen2")
    row = {"input_ids": texts(model)[0]["input_ids"][:1]}
    batch, step = [prepared(model, row)], 1e-2
    with torch.no_grad():
        base = mean_loss(model, batch)
        with masked(model, [Unit(WIDTH, 0, 7)]):
            without = float(mean_loss(model, batch) - base)
    left_out = score_units(model, [row], "contribution", [WIDTH])
    assert float(left_out.of[WIDTH][0][7]) == pytest.approx(without, abs=1e-5)
    losses, gate = [], torch.ones(48)
    for value in (1 - step, 1 + step):
        gate[7] = value
        with torch.no_grad(), gated(model, {(WIDTH, 0): gate}):
            losses.append(float(mean_loss(model, batch)))
    targets = row["input_ids"].numel() - 1
    slope = targets * (losses[1] - losses[0]) / (2 * step)
    fisher = score_units(model, [row], "fisher", ALL_KINDS)
    assert [len(fisher.of[kind]) for kind in ALL_KINDS] == [3, 3, 3, 1]
    assert float(fisher.of[WIDTH][0][7]) == pytest.approx(slope**2 / 2 / targets, rel=0.05)
    with pytest.raises(UserError, match="a width has several"):
        score_units(model, [row], "surgeon", [WIDTH])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_so_many_fewer_parameters_and_hardly_more(wide, share):
    """What crosses goes once: prices are those of what is left."""
    gone = fewer_parameters(wide, score_units(wide, None, "random", ALL_KINDS), share)
    lost = {kind: [unit for unit in gone if unit.kind == kind] for kind in ALL_KINDS}
    smaller = prune(wide, gone)
    assert lost[WIDTH]
    assert len(unit_map(smaller, WIDTH)[0]) % group_of(48, WIDTH) == 0
    left = numbers(smaller) / numbers(wide)
    assert 1 - share - parameters_of(wide, "head", 0) / numbers(wide) < left <= 1 - share


def test_prices_are_parameters(wide):
    for kind, layer in (("head", 1), ("neuron", 2), ("layer", 0)):
        unit = Unit(kind, layer, 0)
        alone = [numbers(wide) - numbers(prune(wide, [one])) for one in (unit, THIN[0])]
        both = numbers(wide) - numbers(prune(wide, [unit, THIN[0]]))
        assert alone == [parameters_of(wide, kind, layer), parameters_of(wide, WIDTH, 0)]
        assert sum(alone) - both == parameters_by_dimension(wide, kind, layer)


def test_a_thinner_model_is_so_many_times_as_fast(built, monkeypatch):
    """On a clock that counts parameters: the answer is then known."""
    monkeypatch.setattr(
        "pnn.plasticity.budget.reading_times", lambda models, length: {name: numbers(one) for name, one in models.items()}
    )
    model = built("llama")
    gone = faster(model, score_units(model, None, "random", ["neuron", WIDTH]), 2.0, 8)
    assert {unit.kind for unit in gone} == {"neuron", WIDTH}
    assert numbers(model) / numbers(prune(model, gone)) == pytest.approx(2.0, rel=0.05)


def test_what_crosses_is_paid_for_once():
    """Of 12 wanted the head gives 6; the two dimensions then give 10 − 2 · 2, just what is missing."""
    head = Portion("head", 0, (Unit("head", 0, 0),), 0.1, 6.0, crossing=2.0)
    other = Portion("neuron", 0, (Unit("neuron", 0, 0),), 1.0, 6.5, crossing=1.0)
    thin = Portion(WIDTH, 0, (Unit(WIDTH, 0, 0), Unit(WIDTH, 0, 1)), 2.0, 10.0)
    assert share_out([head, other, thin], 12, 1) == ([head.units[0], *thin.units], 12.0)


@pytest.mark.parametrize(("width", "together"), [(288, 16), (576, 32), (1024, 64), (4096, 64), (48, 2)])
def test_dimensions_go_in_groups(width, together):
    assert group_of(width, WIDTH) == together


def test_what_remains_takes_over(wide, texts):
    batches, small = texts(wide, rows=4), prune(wide, [*THIN, ("neuron", 1, 7)])
    cut, mended = (output_errors(one, wide, batches) for one in (small, repair(small, wide, batches)))
    first = next(iter(cut))
    assert 0 < mended[first] < 0.9 * cut[first]
    assert sum(mended.values()) < 0.9 * sum(cut.values())


# What is refused, and the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "opt", "ddl", *ENCODERS])
def test_other_norms_are_refused_in_a_sentence(name, built):
    with pytest.raises(UserError, match=r"RMSNorms alone \(llama, mistral, qwen2\): a \w+ model without some"):
        prune(built(name), [Unit(WIDTH, 0, 0)])
    with pytest.raises(UserError, match="width goes only from models"):
        check(built(name), ShrinkSettings(fewer=0.1, kinds=(WIDTH,), teacher="none"))


def test_an_architecture_like_llama_with_other_norms_is_refused_too(monkeypatch):
    class Phi(Llama):
        model_types = ("phi",)

    monkeypatch.setitem(ARCHITECTURES, "phi", Phi())
    phi = hf.PhiForCausalLM(hf.PhiConfig(**LLAMA, num_key_value_heads=6, bos_token_id=None, eos_token_id=None))
    with pytest.raises(UserError, match="a phi model without some dimensions"):
        prune(phi, [Unit(WIDTH, 0, 0)])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([(WIDTH, 0, 48)], "no width 48 in layer 0"),
        ([(WIDTH, 1, 0)], "no width 0 in layer 1"),
        ([(WIDTH, 0, index) for index in range(48)], "would leave the model no width at all"),
    ],
)
def test_what_cannot_go(built, asked, message):
    with pytest.raises(UserError, match=message):
        prune(built("llama"), asked)


def test_settings_that_do_not_go_together():
    with pytest.raises(UserError, match="states needs states of one width"):
        ShrinkSettings(fewer=0.1, kinds=ALL_KINDS, teacher="states")
    with pytest.raises(UserError, match="surgeon compares units of one matrix, not width"):
        ShrinkSettings(fewer=0.1, kinds=(WIDTH,), by="surgeon")


def test_one_command_makes_a_thinner_model(pnn_command, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        **GROUPED | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}, tie_word_embeddings=True
    )
    hf.LlamaForCausalLM(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("text.txt").write_text(language())
    words = ("--data", "text.txt", "--learn-steps", 2, "--batch-size", 4, "--score-rows", 4, "--validation-rows", 8)
    code, out, err = pnn_command("shrink", "model", "--parameters", "-30%", "--kinds", "width", *words, "--output", "thin")
    assert code == 0, err
    assert "width" in out
    thin = hf.AutoModelForCausalLM.from_pretrained("thin")
    summary = json.loads(Path("thin/summary.json").read_text())
    assert summary["after"]["units"]["width"] == len(thin.config.width_map) < 48
    assert summary["after"]["parameters"] == numbers(thin)
    assert f"| width | {len(thin.config.width_map)} of 48 |" in Path("thin/README.md").read_text()
    code, _, err = pnn_command("shrink", "model", "--parameters", "-99%", "--kinds", "width", *words, "--output", "no")
    assert code == 2
    assert "width that may go hold 9" in " ".join(err.split())
