"""Scores of heads: known answers, and each measure against its definition."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.errors import UserError
from pnn.models.registry import kind_of
from pnn.nn.attention import SelfAttention
from pnn.nn.causal import Past, causal_mask
from pnn.nn.decoder import CausalAttention, Context
from pnn.nn.packing import Layout
from pnn.nn.rotary import rotation
from pnn.plasticity import Scores, choose, heads, masked, prune, score
from pnn.plasticity.heads import head_map, stretches
from pnn.plasticity.scores import METHODS, count_targets, mean_loss, prepared, row_entropy
from pnn.plasticity.units import gated


def plant(model, change):
    """A copy in which `change` was applied to the queries of every head."""
    planted = copy.deepcopy(model)
    with torch.no_grad():
        for head in heads(planted):
            for one in stretches(planted, head):
                if one.role == "q":
                    change(one.view())
    return planted


def plain(rows, length):
    return [{"input_ids": torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(5))}]


# Entropy --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 2, 7, 64])
def test_entropy_of_uniform_and_of_one_hot_attention(keys):
    assert float(row_entropy(torch.full((keys,), 1 / keys))) == pytest.approx(math.log(keys), abs=1e-5)
    assert float(row_entropy(torch.eye(keys)[0])) == 0.0


def test_uniform_attention_in_a_model(model):
    scores = score(plant(model, torch.Tensor.zero_), plain(2, 9), "entropy")
    causal = kind_of(model).causal
    expected = sum(math.log(seen) for seen in range(1, 10)) / 9 if causal else math.log(9)
    assert set(scores) == set(heads(model))
    assert list(scores.values()) == pytest.approx([expected] * len(scores), abs=1e-5)
    assert scores.highest_go
    normalised = score(plant(model, torch.Tensor.zero_), plain(2, 9), "normalised_entropy")
    assert list(normalised.values()) == pytest.approx([1.0] * len(scores), abs=1e-5)


WINDOWED = {
    "mistral": lambda shape: hf.MistralForCausalLM(hf.MistralConfig(**shape, sliding_window=3)),
    "qwen2": lambda shape: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**shape, sliding_window=3, use_sliding_window=True, max_window_layers=1)
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_uniform_attention_within_a_window(name):
    """Left padding is not in sight either."""
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = plant(WINDOWED[name](shape | {"num_key_value_heads": 1}).eval(), torch.Tensor.zero_)
    batch = plain(2, 9)[0] | {"attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5])}
    assert list(score(model, [batch], "normalised_entropy").values()) == pytest.approx([1.0] * 2, abs=1e-5)
    entropy = score(model, plain(2, 9), "entropy")
    near, far = ((math.log(2) + 7 * math.log(3)) / 9, sum(math.log(seen) for seen in range(1, 10)) / 9)
    expected = [near, near] if name == "mistral" else [far, near]  # Qwen2's first layers see everything
    assert [entropy[layer, 0] for layer in (0, 1)] == pytest.approx(expected, abs=1e-5)


def test_one_hot_attention_in_a_model(model):
    def sharpen(queries):
        queries.mul_(1e5)

    planted = plant(model, sharpen)
    for name, parameter in planted.named_parameters():
        if "query_norm" in name:  # DDL normalises what was multiplied
            parameter.data.mul_(1e5)
    assert max(score(planted, plain(2, 9), "entropy").values()) < 0.05


def test_padding_does_not_count(model):
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(6))
    padded = torch.cat((ids, torch.zeros_like(ids)), dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 6])
    alone = score(model, [{"input_ids": ids}], "entropy")
    beside = score(model, [{"input_ids": padded, "attention_mask": mask}], "entropy")
    assert list(beside.values()) == pytest.approx(list(alone.values()), abs=1e-5)


def test_a_mean_over_rows_not_over_batches(built):
    model = built("gpt2")
    short, long = (torch.randint(1, 50, (1, n), generator=torch.Generator().manual_seed(n)) for n in (4, 12))
    one, two, both = (score(model, batches, "entropy") for batches in ([short], [long], [short, long]))
    for head in heads(model):
        assert both[head] == pytest.approx((4 * one[head] + 12 * two[head]) / 16, abs=1e-6)


def test_entropy_is_that_of_transformers_own_weights(built):
    model, batch = built("llama"), plain(2, 9)[0]
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    weights = model(**batch, output_attentions=True).attentions
    scores = score(built("llama"), [batch], "entropy")
    for layer, attention in enumerate(weights):
        by_group = row_entropy(attention).mean((0, 2)).view(3, 2).mean(1)
        assert [scores[layer, index] for index in range(3)] == pytest.approx(by_group.tolist(), abs=1e-5)


def test_packed_and_padded_sequences_have_the_same_entropy(built):
    model = built("pnn")
    ids = torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    packed = {"input_ids": ids, "cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32)}
    rows = torch.zeros(2, 13, dtype=torch.long)
    rows[0, :7], rows[1] = ids[0, :7], ids[0, 7:]
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 7:] = 0
    one, other = score(model, [packed], "entropy"), score(model, [{"input_ids": rows, "attention_mask": mask}], "entropy")
    assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-5)


def test_weights_are_those_that_attention_uses():
    torch.manual_seed(0)
    keep = torch.tensor([[True] * 5, [True, True, True, False, False]])
    ours = SelfAttention(16, 2)
    h = torch.randn(2, 5, 16)
    weights, _ = ours.weights(h, Layout(keep=keep))
    v = ours.qkv(h).view(2, 5, 3, 2, 8)[:, :, 2].transpose(1, 2)
    assert ((weights @ v).transpose(1, 2).reshape(2, 5, 16) - ours.context(h, Layout(keep=keep))).abs().max() < 1e-6
    causal = CausalAttention(16, 2, 1e-5)
    for mask in (None, causal_mask(keep, 5, 0, h.device)):
        context = Context(*rotation(torch.arange(5)[None], 8, 10000.0), Past(mask))
        v = causal.qkv(h).view(2, 5, 3, 2, 8)[:, :, 2].transpose(1, 2)
        mixed = (causal.weights(h, context) @ v).transpose(1, 2).reshape(2, 5, 16)
        assert (causal.out(mixed) - causal(h, context)).abs().max() < 1e-6


# The loss -------------------------------------------------------------------------------------------------------------


def test_contribution_is_the_difference_that_masking_makes(model, texts):
    batches = texts(model)
    scores = score(model, batches, "contribution")
    prepared = [batch | ({"use_cache": False} if model.can_generate() else {}) for batch in batches]
    with torch.no_grad():
        base = float(mean_loss(model, prepared))
        for head in [(0, 0), (1, 2), (2, 1)]:
            with masked(model, [head]):
                assert scores[head] == pytest.approx(float(mean_loss(model, prepared)) - base, abs=1e-6)
            assert scores[head] == pytest.approx(float(mean_loss(prune(model, [head]), prepared)) - base, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_nothing_is_predicted_from_padding(decoder, side):
    ids = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(6))
    parts = (torch.zeros_like(ids), ids) if side == "left" else (ids, torch.zeros_like(ids))
    row = torch.cat(parts, dim=1)
    alone, padded = prepared(decoder, ids), prepared(decoder, {"input_ids": row, "attention_mask": row.ne(0).long()})
    assert count_targets(decoder, padded) == count_targets(decoder, alone) == 5
    if side == "left":
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        assert float(mean_loss(decoder, [padded])) == pytest.approx(float(mean_loss(decoder, [alone])), rel=1e-5)


def test_the_loss_is_a_mean_over_targets(built, texts):
    model, batches = built("gpt2"), texts(built("gpt2"))
    with torch.no_grad():
        one, two = (float(model(**batch).loss) for batch in batches)
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert weights[0] > weights[1]
    expected = (weights[0] * one + weights[1] * two) / sum(weights)
    assert float(mean_loss(model, batches).detach()) == pytest.approx(expected, abs=1e-6)


def rows_of(batches):
    """Each row as a batch of its own, those without a target left out."""
    rows = [{key: value[at : at + 1] for key, value in batch.items()} for batch in batches for at in range(2)]
    return [row for row in rows if (row["labels"] != -100).any()]


def exact_loss(model, batches):
    """A decoder's mean loss in 64 bit; its own is rounded to 32."""
    logits = torch.cat([model(**{**batch, "labels": None}).logits[:, :-1].flatten(0, 1) for batch in batches])
    return float(F.cross_entropy(logits, torch.cat([batch["labels"][:, 1:].flatten() for batch in batches])))


def test_gradients_are_finite_differences_row_by_row(model, texts):
    batches = texts(model)
    scores = score(model, batches, "gradient")
    exact = copy.deepcopy(model).double()
    # most models have norms or losses that are computed in 32 bit whatever they are given: there a long step, which their
    # smooth activations allow; OPT's has a kink
    in_64_bit = model.config.model_type in ("gpt2", "opt")
    loss_of, step, rel = (exact_loss, 1e-6, 1e-3) if in_64_bit else (mean_loss, 0.02, 1e-2)
    rows = rows_of(batches)
    weights = [count_targets(model, row) for row in rows]
    assert len(set(weights)) > 1
    for layer, position in [(0, 0), (1, 2), (2, 1)]:
        gate = torch.ones(len(head_map(model)[layer]), dtype=torch.float64)
        losses = []
        for value in (1 - step, 1 + step):
            gate[position] = value
            with torch.no_grad(), gated(exact, {("head", layer): gate}):
                losses.append([float(loss_of(exact, [row])) for row in rows])
        slopes = [abs(after - before) / (2 * step) for before, after in zip(*losses, strict=True)]
        expected = sum(weight * slope for weight, slope in zip(weights, slopes, strict=True)) / sum(weights)
        assert scores[layer, position] == pytest.approx(expected, rel=rel, abs=5e-5)


def test_gradients_of_rows_do_not_cancel(built):
    """Two rows that pull a head in opposite directions leave nothing of the mean loss's gradient, and all of the score."""
    model, rows = built("gpt2"), texts_with_opposite_slopes(built("gpt2"))
    together = score(model, [{"input_ids": torch.cat([row["input_ids"] for row in rows])}], "gradient")
    alone = [score(model, [row], "gradient") for row in rows]
    for head in heads(model):
        assert together[head] == pytest.approx((alone[0][head] + alone[1][head]) / 2, rel=1e-4, abs=1e-6)


def texts_with_opposite_slopes(model):
    """Two rows whose losses have slopes of different sign for the gate of head (0, 0)."""
    found = {}
    for seed in range(50):
        row = {"input_ids": torch.randint(1, 50, (1, 9), generator=torch.Generator().manual_seed(seed))}
        gate = torch.ones(4, requires_grad=True)
        with gated(model, {("head", 0): gate}):
            slope = torch.autograd.grad(model(**row, labels=row["input_ids"]).loss, gate)[0][0]
        found.setdefault(bool(slope > 0), row)
    return list(found.values())


def test_all_gradients_cost_one_pass(built, texts):
    model = copy.deepcopy(built("gpt2"))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    score(model, texts(model), "gradient")
    assert len(passes) == 2  # two batches
    passes.clear()
    score(model, texts(model), "combined")
    assert len(passes) <= 3 * 2


def test_a_causal_model_needs_no_labels(decoder, texts):
    given = [{key: batch[key] for key in ("input_ids", "attention_mask")} for batch in texts(decoder)]
    assert score(decoder, given, "gradient") == score(decoder, texts(decoder), "gradient")
    ids = texts(decoder)[0]["input_ids"]
    assert score(decoder, [ids], "gradient") == score(decoder, [{"input_ids": ids}], "gradient")


@pytest.mark.parametrize("name", ["GPT2ForSequenceClassification", "BertForSequenceClassification"])
def test_classifiers_have_one_target_a_row(name):
    torch.manual_seed(0)
    config = (hf.GPT2Config if name.startswith("GPT2") else hf.BertConfig)(
        vocab_size=50, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, pad_token_id=0
    )
    model = getattr(hf, name)(config).eval()
    rows = [batch | {"labels": torch.tensor([0, 1])} for batch in plain(2, 9)]
    assert count_targets(model, rows[0]) == 2
    assert len(set(score(model, rows, "contribution").values())) > 4


# The others -----------------------------------------------------------------------------------------------------------


def test_magnitude_is_the_sum_of_four_norms(built):
    attention = copy.deepcopy(built("gpt2")).requires_grad_(False).transformer.h[1].attn
    scores = score(built("gpt2"), method="magnitude")
    inputs = attention.c_attn.weight.view(32, 3, 4, 8)  # Conv1D: (in, out)
    expected = sum(float(inputs[:, role, 2].norm()) for role in range(3)) + float(attention.c_proj.weight[16:24].norm())
    assert scores[1, 2] == pytest.approx(expected, rel=1e-6)
    assert not scores.highest_go


def test_random_scores_come_from_their_seed(built):
    one, same, other = (score(built("gpt2"), method="random", seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert all(0 <= value < 1 for value in one.values())


def test_combined_is_the_mean_of_ranks(built, texts):
    model, batches = built("bert"), texts(built("bert"))
    total = dict.fromkeys(heads(model), 0.0)
    for method in ("entropy", "magnitude", "gradient"):
        useful = score(model, batches, method).usefulness()
        for rank, head in enumerate(sorted(useful, key=useful.__getitem__)):
            total[head] += rank / (len(useful) - 1) / 3
    combined = score(model, batches, "combined")
    assert combined == pytest.approx(total)


@pytest.mark.parametrize("method", METHODS)
def test_every_measure_on_unequal_layers(model, texts, method):
    changed = prune(model, [head for head in heads(model) if head[0] == 0] + [(2, 1)], whole_layers=True)
    scores = score(changed, texts(changed), method)
    assert list(scores) == heads(changed)
    assert len(set(scores.values())) > 1


def test_dropout_is_off_while_scoring_and_on_again_afterwards(built, texts):
    model = copy.deepcopy(built("pnn")).train()
    model.head.eval()
    training = [module.training for module in model.modules()]
    assert score(model, texts(model), "contribution") == score(built("pnn"), texts(model), "contribution")
    assert [module.training for module in model.modules()] == training


# Choosing -------------------------------------------------------------------------------------------------------------


def grid(layers, count, value=lambda layer, index: 0.0):
    return {(layer, index): value(layer, index) for layer in range(layers) for index in range(count)}


def test_a_third_of_distilgpt2_leaves_51_of_72():
    assert 72 - len(choose(grid(6, 12, lambda layer, index: layer * 12 + index), 0.3, floor=0)) == 51
    assert 72 - len(choose(grid(6, 12), 0.3)) == 51
    assert 72 - len(choose(grid(6, 12), 0.3, per_layer=True)) == 51


@pytest.mark.parametrize(("count", "ratio", "gone"), [(8, 0.5, 4), (8, 0.25, 2), (100, 0.29, 29), (10, 0.7, 7), (12, 0.0, 0)])
def test_counts_are_rounded_down(count, ratio, gone):
    assert len(choose(grid(1, count), ratio)) == gone


def test_the_least_useful_go_and_ties_by_place():
    values = grid(2, 4, lambda layer, index: abs(index - 2))
    assert choose(values, 0.25) == [(0, 2), (1, 2)]
    assert choose(values, 0.5) == [(0, 1), (0, 2), (0, 3), (1, 2)]
    assert choose(Scores(values, highest_go=True), 0.25) == [(0, 0), (1, 0)]


def test_a_floor_spares_the_last_of_a_layer():
    values = grid(2, 4, lambda layer, index: layer)
    assert choose(values, 0.5) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert choose(values, 0.5, floor=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert choose(values, 0.5, floor=0) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_per_layer_every_layer_loses_the_same_share():
    gone = choose(grid(6, 12, lambda layer, index: layer), 0.3, per_layer=True)
    counts = [sum(at == layer for at, _ in gone) for layer in range(6)]
    assert (sum(counts), sorted(counts)) == (21, [3, 3, 3, 4, 4, 4])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    ratio=st.floats(0, 1),
    floor=st.integers(0, 2),
    per_layer=st.booleans(),
    seed=st.integers(0, 5),
)
def test_a_choice_has_its_size_and_keeps_its_floor(sizes, ratio, floor, per_layer, seed):
    draw = torch.Generator().manual_seed(seed)
    values = {(at, i): float(torch.rand((), generator=draw)) for at, size in enumerate(sizes) for i in range(size)}
    wanted = math.floor(ratio * len(values) + 1e-9)
    if not per_layer and wanted > sum(max(0, size - floor) for size in sizes):
        with pytest.raises(UserError, match="cannot prune"):
            choose(values, ratio, floor=floor)
        return
    if per_layer and any(math.ceil(ratio * size) > max(0, size - floor) for size in sizes):
        return  # may or may not be possible: which layers lose one more depends on their remainders
    gone = choose(values, ratio, per_layer=per_layer, floor=floor)
    assert len(gone) == wanted
    for layer, size in enumerate(sizes):
        lost = sum(at == layer for at, _ in gone)
        assert lost <= max(0, size - floor)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_misspelt_measure(built):
    with pytest.raises(UserError, match='did you mean "entropy"'):
        score(built("gpt2"), method="entropie")


@pytest.mark.parametrize("method", ["entropy", "contribution", "gradient", "combined"])
def test_a_measure_that_needs_text(built, method):
    with pytest.raises(UserError, match="needs batches"):
        score(built("gpt2"), [], method)


def test_a_masked_model_needs_labels(built):
    with pytest.raises(UserError, match='need "labels"'):
        score(built("bert"), plain(1, 5), "gradient")


def test_text_without_a_target(built):
    nothing = [batch | {"labels": torch.full((1, 5), -100)} for batch in plain(1, 5)]
    for method in ("gradient", "contribution"):
        with pytest.raises(UserError, match="no batch has a token to predict"):
            score(built("gpt2"), nothing, method)


def test_a_model_without_a_head_has_no_loss(built, texts):
    encoder = built("bert").bert
    assert score(encoder, texts(built("bert")), "entropy") == score(built("bert"), texts(built("bert")), "entropy")
    with pytest.raises(UserError, match="without a head computes no loss"):
        score(encoder, texts(built("bert")), "gradient")


def test_a_model_whose_numbers_overflow(built, texts):
    broken = copy.deepcopy(built("gpt2"))
    broken.transformer.wte.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="the score of head 0 in layer 0 is nan"):
        score(broken, texts(broken), "gradient")


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_share_that_is_none(ratio):
    with pytest.raises(UserError, match="between 0 and 1"):
        choose(grid(2, 2), ratio)


def test_more_than_the_floor_allows():
    with pytest.raises(UserError, match="cannot prune 8 of 8 heads and keep 1 in each layer: at most 6 can go"):
        choose(grid(2, 4), 1.0)
