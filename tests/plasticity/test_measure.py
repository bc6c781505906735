"""What a model is worth and what it costs, and the text that it is measured on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_cycles import LENGTH, language

from pnn.data.masking import SpecialTokens
from pnn.models.flops import inference_flops
from pnn.plasticity import Text, prune
from pnn.plasticity.measure import _rates, flops_per_token, held_out_loss, missing_capacity, size, speeds
from pnn.plasticity.phases import learn_round
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.text import read_text


def test_every_token_counts_the_same(model_of, text):
    model = model_of("gpt2")
    found = held_out_loss(model, text)
    with torch.no_grad():
        logits = model(text.held_out).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), text.held_out[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["targets"] == text.held_out[:, 1:].numel()
    low, high = found["loss_interval"]
    assert low < found["loss"] < high


def test_masks_are_the_texts_own(model_of, rows, tokenizer):
    special = SpecialTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids))
    text = Text(rows[:-16], rows[-16:], special)
    found = held_out_loss(model_of("bert"), text)
    assert 0.08 < found["targets"] / text.held_out.numel() < 0.2
    batch = text.inputs(text.held_out)
    with torch.no_grad():
        expected = F.cross_entropy(model_of("bert")(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
    assert len(set((batch["labels"] != -100).sum(1).tolist())) > 1  # rows of different weight
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    assert held_out_loss(model_of("bert"), text) == found
    one, again = (text.for_update(5, 4, seed=1) for _ in range(2))
    assert torch.equal(one["labels"], again["labels"])
    assert not torch.equal(one["input_ids"], text.for_update(5, 4, seed=2)["input_ids"])


def test_every_epoch_has_all_rows_in_an_order_of_its_own(rows):
    text = Text(rows[:8], rows[8:12])
    epochs = [torch.cat([text.for_update(step, 4, seed=1)["input_ids"] for step in (at, at + 1)]) for at in (0, 2, 4)]
    assert all({*map(tuple, epoch.tolist())} == {*map(tuple, rows[:8].tolist())} for epoch in epochs)
    assert not any(torch.equal(epochs[a], epochs[b]) for a, b in ((0, 1), (1, 2), (0, 2)))


def test_every_round_reads_on_and_is_scored_on_other_rows(model_of, text, monkeypatch):
    asked, batch_of = [], Text.for_update
    monkeypatch.setattr(Text, "for_update", lambda self, step, *how: asked.append(step) or batch_of(self, step, *how))
    for round_ in (1, 2):
        model = model_of("gpt2")
        list(learn_round(model, [], text, CycleSettings(learn_steps=2, batch_rows=2), round_, model))
    assert asked == [0, 1, 2, 3]
    first, second = (text.sample(3, 0, round_) for round_ in (1, 2))
    assert not torch.equal(first, second)


def test_flops_are_those_of_the_bench_and_fall_with_heads(model_of):
    model = model_of("ddl")
    assert flops_per_token(model, LENGTH) == inference_flops(model.config, LENGTH / 2, 1.0)
    smaller = prune(model, [(0, 1), (2, 3)])
    per_head = 2 * 4 * 32 * 8 + 4 * (LENGTH / 2) * 8
    assert flops_per_token(model, LENGTH) - flops_per_token(smaller, LENGTH) == 2 * per_head
    assert size(model, LENGTH)["attention_parameters"] - size(smaller, LENGTH)["attention_parameters"] == 2 * 4 * 32 * 8


@pytest.mark.parametrize("kind", ["gpt2", "ddl", "bert"])
def test_speed_is_that_of_reading(model_of, kind):
    """A decoder's logits are made for the last token of a row alone; an encoder has no such choice."""
    model, seen = model_of(kind), set()
    hook = model.register_forward_hook(lambda module, inputs, out: seen.add(out.logits.shape[:2]))
    rows = speeds({"whole": model, "again": model}, 8, largest_only=True)
    hook.remove()
    assert [(row["batch"], row["length"]) for row in rows] == [(8, 2), (8, 8)]
    assert all(rate > 0 for row in rows for rate in row["tokens_per_second"].values())
    assert seen == ({(8, 2), (8, 8)} if kind == "bert" else {(8, 1)})


def test_speeds_are_compared_turn_by_turn():
    """The machine is slow in other turns for one than for the other: medians alone would say that they are equally fast."""
    times = {"whole": [4.0, 2.0, 2.0, 8.0, 6.0], "smaller": [2.0, 4.0, 1.0, 4.0, 4.0]}
    found = _rates(times, 100)
    assert np.median(times["whole"]) == np.median(times["smaller"])
    assert found == {"whole": 25.0, "smaller": 50.0}


def test_capacity_is_missing_only_where_heads_went(model_of, text):
    smaller = prune(model_of("gpt2"), [(0, 1), (2, 3)])
    missing = missing_capacity(smaller, text.batches(text.train[:8], 4))
    assert missing[1] is None
    assert sum(value for value in missing if value is not None) == pytest.approx(1)


def test_batches_follow_from_the_step(text):
    size_, count = 4, len(text.train)
    epoch = [text.for_update(step, size_, seed=0)["input_ids"] for step in range(count // size_)]
    seen = {tuple(row.tolist()) for batch in epoch for row in batch}
    assert seen <= {tuple(row.tolist()) for row in text.train}
    assert len(torch.cat(epoch).unique(dim=0)) >= len(text.train.unique(dim=0)) - size_
    assert torch.equal(text.for_update(3, size_, 0)["input_ids"], epoch[3])


@pytest.mark.parametrize("kind", ["bert", "pnn"])
def test_an_encoder_reads_lines_as_it_was_trained_on_them(kind, model_of, tokenizer, tmp_path):
    lines = [line for line in language().splitlines() if line.strip()][:40]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    model = model_of(kind)
    text = read_text(model, tokenizer, str(tmp_path / "lines.txt"), progress=lambda items, _: items)
    wanted = [tokenizer.encode(line, truncation=True, max_length=LENGTH) for line in lines]
    assert len({len(ids) for ids in wanted}) > 1
    rows = [*text.train, *text.held_out]
    assert [[token for token in row.tolist() if token != tokenizer.pad_token_id] for row in rows] == wanted
    batch = next(text.batches(text.held_out, 2))
    assert batch["labels"][batch["attention_mask"] == 0].eq(-100).all()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    short = int(batch["attention_mask"][0].sum())
    one = model(input_ids=batch["input_ids"][:1, :short]).logits
    assert torch.allclose(logits[0, :short], one[0], atol=1e-5)
