"""The naive baseline is our model computed another way: same loss, same gradients, same curve, on the same masks."""

import numpy as np
import pytest
import torch

import pnn
from pnn.bench import training
from pnn.bench.curves import loss_curves
from pnn.bench.naive import NaivePNN, NaiveTrainer, check_published_design, naive_weights
from pnn.bench.padding import micro_batches, pad
from pnn.config import load_config
from pnn.data.batches import pack
from pnn.data.masking import SpecialTokens
from pnn.errors import UserError
from pnn.objectives import IGNORE

PAD, CLS, SEP, MASK, VOCABULARY = 0, 2, 3, 4, 60
VARIANTS = {
    "equations": {"delta_norm": False, "gate_bias": False, "zero_init": True},
    "published": {"delta_norm": True, "gate_bias": True, "zero_init": False},
}


def masked_batch(lengths=(12, 5, 9, 16), size=48, seed=0):
    """Packed sequences [CLS] … [SEP] with filler behind them, and their mask."""
    generator = np.random.default_rng(seed)
    rows = [np.concatenate(([CLS], generator.integers(5, VOCABULARY, n - 2), [SEP])) for n in lengths]
    batch = pack(np.concatenate(rows), np.array(lengths), np.arange(1, len(lengths) + 1), size, filler=PAD)
    return batch, batch.mask(SpecialTokens(MASK, VOCABULARY, (PAD, CLS, SEP)), 0.3, seed)


def model(**changes):
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    settings |= {"max_position_embeddings": 16, "dropout": 0.0, "initializer_range": 0.2}
    ours = pnn.PNNForMaskedLM(pnn.PNNConfig(**(settings | changes)))
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for parameter in ours.parameters():
            if parameter.dim() == 1 and parameter.numel() > 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return ours


def our_loss(ours, batch, masked):
    return ours(
        input_ids=masked.input_ids[None],
        position_ids=batch.position_ids[None],
        cu_seqlens=batch.cu_seqlens,
        labels=masked.labels,
        logit_positions=masked.positions,
    ).loss


def test_padding_keeps_sequences_masks_and_targets():
    batch, masked = masked_batch()
    padded = pad(batch, masked, 16, PAD)
    assert padded.input_ids.shape == (4, 16)  # the filler has no row
    assert padded.attention_mask.sum(1).tolist() == [12, 5, 9, 16]
    keep = padded.attention_mask.bool()
    assert torch.equal(padded.input_ids[keep], masked.input_ids[:42])
    assert (padded.input_ids[~keep] == PAD).all()
    targets = padded.labels[padded.labels != IGNORE]
    assert len(targets) == len(masked.labels) > 0
    assert torch.equal(targets, masked.labels)
    assert (padded.input_ids[padded.labels != IGNORE] == MASK).all()


def test_padding_takes_places_that_are_not_used():
    """On a GPU masks have a fixed number of places, the last of them empty."""
    batch, masked = masked_batch()
    special = SpecialTokens(MASK, VOCABULARY, (PAD, CLS, SEP))
    roomy = batch.mask(special, 0.3, 0, capacity=len(masked.labels) + 7)
    for here, there in zip(*(vars(pad(batch, m, 16, PAD)).values() for m in (masked, roomy)), strict=True):
        assert torch.equal(here, there)


def test_rows_of_an_update_are_shared_out_evenly():
    parts = [pad(*masked_batch(seed=seed), 16, PAD) for seed in range(3)]
    pieces = micro_batches(parts, rows=5)
    assert [len(piece.input_ids) for piece in pieces] == [6, 6]
    assert torch.equal(torch.cat([piece.labels for piece in pieces]), torch.cat([part.labels for part in parts]))
    assert len(micro_batches(parts, rows=100)) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"gate": "none"}, {"num_steps": 4, "schedule": [0, 1, 1, 0]}])
def test_loss_and_gradients_equal_ours(variant, changes):
    ours = model(**VARIANTS[variant], **changes)
    if VARIANTS[variant]["zero_init"]:  # δ is zero then, and so is most of the gradient: start a little beside it
        with torch.no_grad():
            for refiner in ours.encoder.refiners:
                refiner.ffn.down.weight.normal_(std=0.2)
    naive = NaivePNN.from_pnn(ours)
    batch, masked = masked_batch()
    padded = pad(batch, masked, 16, PAD)
    targets = len(masked.labels)
    losses = [
        our_loss(ours, batch, masked),
        naive.loss(naive(padded.input_ids, padded.attention_mask), padded.labels, targets),
    ]
    for loss in losses:
        loss.backward()
    assert abs(losses[0].item() - losses[1].item()) < 1e-5
    wanted = naive_weights({name: p.grad for name, p in ours.named_parameters()})
    found = {name: p.grad for name, p in naive.named_parameters()}
    assert wanted.keys() == found.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, wanted[name], atol=1e-6, rtol=1e-3), name
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize(
    "changes", [{"gate": "token"}, {"gate_start": 0.1}, {"ffn": "geglu"}, {"positions": "rotary"}, {"random_steps": [1, 4]}]
)
def test_what_the_published_code_does_not_have_has_no_naive_baseline(changes):
    with pytest.raises(UserError, match=f"model.{next(iter(changes))}: .* is not in the published design"):
        check_published_design(pnn.PNNConfig(**changes))


def test_published_design_only():
    for changes, says in (({"update": "delta"}, "model.update: delta"), ({"head_transform": True}, "model.head_transform")):
        with pytest.raises(UserError, match=says):
            NaivePNN(model(**changes).config)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_hundred_updates_give_our_curve(tiny_config, variant):
    config = tiny_config(model={"dropout": 0.0, "num_steps": 2, **VARIANTS[variant]}, training={"max_steps": 200})
    found = loss_curves(load_config(str(config)), 200)
    assert len(found["ours"]) == len(found["naive"]) == 200
    assert found["ours"][-1] < found["ours"][0] - 1  # it did learn
    assert found["largest_difference"] < 1e-3


def test_bf16_stays_near_fp32(tiny_config):
    run = load_config(str(tiny_config(model={"dropout": 0.0})))
    with training.host_trainer_of(run) as host:
        prepared = training.padded_updates(host, 5)
        losses = {}
        for precision in ("fp32", "bf16"):
            trainer = NaiveTrainer(NaivePNN.from_pnn(host.model), run.training, 40, torch.device("cpu"), precision)
            losses[precision] = [trainer.update(batches) for batches, _ in prepared]
            assert len(trainer.accuracies) == 4
            assert all(0 <= value <= 1 for value in trainer.accuracies)
    assert 0 < max(abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)) < 0.05
