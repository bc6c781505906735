"""Deep Delta decoders on a GPU: kernels in 16 bit against double precision, whole models with and without kernels, training and
generation. Run by hand: pytest -m gpu tests/gpu"""

from __future__ import annotations

import pytest
import torch

import pnn
import pnn.models.ddl
import pnn.nn.delta_stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VARIANTS = {
    "scalar": {"value_channels": 1},
    "channel": {},
    "token": {"compressor": "token"},
    "paper": {"reading": "paper"},
    "write only": {"residual": "write_only"},
    "additive": {"residual": "additive", "value_channels": 1},
    "additive, expanded": {"residual": "additive"},
}


def decoder(width=256, **changes):
    torch.manual_seed(0)
    size = {"vocab_size": 500, "hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 2}
    return pnn.DDLForCausalLM(pnn.DDLConfig(**size, max_position_embeddings=128, **changes)).cuda()


def rows():
    return torch.randint(0, 500, (6, 128), generator=torch.Generator().manual_seed(0)).cuda()


def loss_and_gradients(model, dtype):
    model.zero_grad()
    ids = rows()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bf16"):
        loss = model(input_ids=ids, labels=ids, output_logits=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("width", [256, 384, 768])
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_in_16_bit_follow_double_precision_as_well_as_plain_steps_do(name, width, monkeypatch):
    model = decoder(width, **VARIANTS[name])
    calls = []
    run = pnn.nn.delta_stream.run
    monkeypatch.setattr(pnn.nn.delta_stream, "run", lambda *a: calls.append(1) or run(*a))
    fast_loss, fast = loss_and_gradients(model, "bf16")
    assert bool(calls) == (model.config.residual != "additive")
    monkeypatch.setattr(pnn.models.ddl, "for_kernels", lambda x: False)
    monkeypatch.setattr(pnn.nn.delta_stream, "for_kernels", lambda x: False)
    plain_loss, plain = loss_and_gradients(model, "bf16")
    exact_loss, exact = loss_and_gradients(model.double(), "fp64")
    assert abs(fast_loss - exact_loss) < max(0.01, 3 * abs(plain_loss - exact_loss))

    def distance(gradients):
        return ((gradients.double() - exact).norm() / exact.norm()).item()

    assert distance(fast) < max(0.03, 2 * distance(plain))


@pytest.mark.parametrize("name", ["scalar", "channel", "token", "additive"])
def test_compiled_training_follows_uncompiled(name):
    losses = []
    for compiled in (False, True):
        model = decoder(384, **VARIANTS[name]).train()
        if compiled:
            model.base_model.compile_blocks(with_kernels=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen = []
        for _ in range(20):
            loss, _ = loss_and_gradients(model, "bf16")
            optimizer.step()
            seen.append(loss)
        losses.append(seen)
    assert losses[0][-1] < losses[0][0] - 0.5
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_with_a_cache_is_generation_without(name):
    model = decoder(**VARIANTS[name]).eval()
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = rows()[:, :5]
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


def test_memory_does_not_grow_with_the_expanded_state_of_every_sublayer():
    """States are kept at every fourth sublayer."""
    peaks = {}
    for name in ("scalar", "channel"):
        model = decoder(768, **VARIANTS[name]).train()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_and_gradients(model, "bf16")
        peaks[name] = torch.cuda.max_memory_allocated() - before
        del model
    state = 6 * 128 * 768 * 2  # bytes of one vector state
    assert (
        peaks["channel"] - peaks["scalar"] < 24 * state
    )  # six sublayers of three more channels each would be 18, made again 12


@pytest.mark.parametrize("name", ["scalar", "channel", "token", "additive"])
def test_a_small_decoder_trains_through_the_loop_with_its_pass_recorded(name, tmp_path):
    from pnn.config import load_config
    from pnn.runs import read_metrics
    from pnn.training.run import train_run

    changes = [f"model.{key}={value}" for key, value in VARIANTS[name].items()]
    settings = [
        "training.max_steps=40",
        "training.log_every=1",
        "training.precision=bf16",
        f"data.prepared={tmp_path}/prepared",
    ]
    train_run(load_config("ddl_tiny", [*changes, *settings]), tmp_path / "run", quiet=True)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] - 1
