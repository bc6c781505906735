"""Losses are sums over targets divided by one number, so micro-batches add up to the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.objectives import IGNORE, count_targets, cross_entropy, step_weights, weighted_sum

few = settings(deadline=None, max_examples=25)


def logits_and_labels(rows, seed=0, vocab=7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64).float()
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.4] = IGNORE
    return logits, labels


def by_hand(logits, labels):
    """Σ −log softmax(logits)[label] over targets, one at a time."""
    total = 0.0
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        if label != -100:
            total -= row[label] - math.log(sum(map(math.exp, row)))
    return total


@few
@given(st.integers(1, 30), st.integers(0, 1000), st.integers(1, 50))
def test_cross_entropy_is_a_sum_over_targets_divided_by_the_number_given(rows, seed, items):
    logits, labels = logits_and_labels(rows, seed)
    targets = sum(label != -100 for label in labels.tolist())
    assert count_targets(labels).item() == targets
    total = by_hand(logits, labels)
    assert cross_entropy(logits, labels).item() == pytest.approx(total / max(1, targets), rel=1e-5, abs=1e-6)
    assert cross_entropy(logits, labels, items).item() == pytest.approx(total / items, rel=1e-5, abs=1e-6)
    assert cross_entropy(logits, labels, torch.tensor(items)).item() == pytest.approx(total / items, rel=1e-5, abs=1e-6)


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1000))
def test_micro_batches_add_up_to_one_batch_in_value_and_gradient(sizes, seed):
    logits, labels = logits_and_labels(sum(sizes), seed)
    labels[0] = 3
    items = count_targets(labels)
    whole = logits.clone().requires_grad_()
    loss = cross_entropy(whole, labels)
    loss.backward()
    parts = logits.clone().requires_grad_()
    total = 0.0
    for part, part_labels in zip(parts.split(sizes), labels.split(sizes), strict=True):
        part_loss = cross_entropy(part, part_labels, items)
        part_loss.backward(retain_graph=True)
        total += part_loss.item()
    assert total == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(parts.grad, whole.grad, atol=1e-7)


def test_averaging_micro_batches_one_by_one_would_be_something_else():
    logits, _ = logits_and_labels(4)
    labels = torch.tensor([1, IGNORE, 2, 3])
    averaged = (cross_entropy(logits[:2], labels[:2]) + cross_entropy(logits[2:], labels[2:])) / 2
    assert abs(averaged - cross_entropy(logits, labels)) > 1e-3


def test_ignored_rows_get_no_gradient():
    logits, labels = logits_and_labels(20)
    logits.requires_grad_()
    cross_entropy(logits, labels).backward()
    touched = logits.grad.abs().sum(1) > 0
    assert torch.equal(touched, labels != -100)


def test_no_targets_give_zero_not_nan():
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0
    assert torch.count_nonzero(logits.grad) == 0


def test_an_update_without_targets_gives_zero_not_nan():
    labels = torch.full((3,), -100)
    assert cross_entropy(torch.randn(3, 7), labels, count_targets(labels)).item() == 0


def test_half_precision_logits_are_summed_in_full_precision():
    logits, labels = logits_and_labels(20)
    half = logits.to(torch.bfloat16)
    loss = cross_entropy(half, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(cross_entropy(half.float(), labels).item(), abs=1e-7)


def test_a_weighted_sum_weighs_each_loss():
    losses = [torch.tensor(float(x), requires_grad=True) for x in (1, 10, 100)]
    total = weighted_sum(losses, [0.5, 0.2, 0.0])
    total.backward()
    assert total.item() == pytest.approx(2.5)
    assert [loss.grad.item() for loss in losses] == pytest.approx([0.5, 0.2, 0.0])
    with pytest.raises(ValueError, match="3 losses but 2 weights"):
        weighted_sum(losses, [0.5, 0.5])


def test_step_weights_of_few_steps():
    assert step_weights(1) == [1.0]
    assert step_weights(2) == pytest.approx([1 / 3, 2 / 3])
    assert step_weights(4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
