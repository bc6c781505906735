"""The pass between two branches of a Deep Delta decoder: the same numbers and gradients as plain torch, in every form."""

from __future__ import annotations

import pytest
import small_decoders
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

import pnn
import pnn.models.ddl
import pnn.nn.delta_stream
import pnn.objectives
from pnn.kernels import rewriting
from pnn.models.decoder_steps import Steps
from pnn.nn import delta_rule

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS, LENGTH = 2, 7
WIDTH = 12  # three pieces of four; eight is one piece, and quicker where there is much else to try
FORMS = [  # width, channels, taps, rewrites, erases, generates, values from the state
    (*shape, *writes, *reads)
    for at, shape in enumerate([(WIDTH, 1, 1), (WIDTH, 4, 1), (8, 2, 4)])
    for number, writes in enumerate([(False, False), (True, False), (True, True)])
    for other, reads in enumerate([(False, False), (True, False), (True, True)])
    if ON_GPU or (at + number + other) % 3 == 0  # Triton's interpreter is slow: any two of the three meet, not all three
]
FORMS += [(WIDTH, 4, 4, True, True, True, True), (10, 2, 1, True, True, True, True)]  # ten: a piece that is not full


def plain(states, write, reader, erase):
    """The same in plain torch, on states (tokens, c, d)."""
    x = states
    if write is not None:
        rule = delta_rule.rewrite if erase else delta_rule.write_only
        direction = delta_rule.soft_unit(write.branch, delta_rule.DIRECTION_EPS)
        x = rule(x, direction, write.values, write.betas[:, None])
    new_states = x
    if reader.mix is None:
        x = x.squeeze(1)
    elif reader.mix.dim() == 2:
        x = (x * reader.mix).sum(1)
    else:
        in_rows = x.view(ROWS, LENGTH, *x.shape[1:])
        x = delta_rule.over_tokens(in_rows, reader.mix, None).sum(-2).flatten(0, 1)
    context = reader.norm * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + reader.eps)
    if reader.gate is None:
        return new_states, context
    values = 4 * torch.sigmoid(x @ reader.value.t() + reader.value_bias) if reader.from_state else context @ reader.value.t()
    return new_states, context, values, 2 * torch.sigmoid(context @ reader.gate + reader.gate_bias)


def numbers(*shape):
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form):
    width, channels, taps, rewrites, erase, generates, from_state = form
    torch.manual_seed(0)
    tokens = ROWS * LENGTH
    states = numbers(tokens, channels, width)
    betas = (2 * torch.rand(tokens, device=DEVICE)).requires_grad_()
    write = rewriting.Write(numbers(tokens, width), numbers(tokens, channels), betas) if rewrites else None
    mix = None if channels == 1 else numbers(*([taps] if taps > 1 else []), channels, width)
    generators = [numbers(channels, width), numbers(channels) if from_state else None, numbers(width), numbers(1)]
    reader = rewriting.Reader(mix, numbers(width), *(generators if generates else [None] * 4), 1e-5, from_state)
    new_states, read = rewriting.sublayer(rewriting.Tape(erase, LENGTH), states, write, reader)
    found = [x for x in (new_states, *read) if x is not None]
    wanted = plain(states, write, reader, erase)
    leaves = [x for x in (states, *(write or ()), *reader[:6]) if x is not None]
    incoming = [torch.randn_like(x) for x in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    ours, theirs = (torch.autograd.grad(out, leaves, incoming) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * (1 + other.abs().max().item()))


def test_states_that_were_not_kept_are_made_again():
    torch.manual_seed(0)
    tape = rewriting.Tape(erase=True, row_length=LENGTH, every=3)
    state = torch.randn(ROWS * LENGTH, 4, 8, device=DEVICE)
    states = []
    for _ in range(5):
        write = rewriting.Write(
            torch.randn(ROWS * LENGTH, 8, device=DEVICE),
            torch.randn(ROWS * LENGTH, 4, device=DEVICE),
            torch.rand(ROWS * LENGTH, device=DEVICE),
        )
        reader = rewriting.Reader(torch.ones(4, 8, device=DEVICE), torch.ones(8, device=DEVICE), *[None] * 4, 1e-5, False)
        new_state, _, _, sums = rewriting._run_forward(state, write, reader, True, LENGTH)
        tape.add(state, write, sums)
        states.append(state)
        state = new_state
    assert sorted(tape.kept) == [0, 3]
    for number in reversed(range(5)):
        assert torch.allclose(tape.take(number), states[number], atol=1e-6)
    assert not tape.kept
    with pytest.raises(RuntimeError, match="another forward pass"):
        tape.take(0)


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    tape = rewriting.Tape(erase=True, row_length=LENGTH, keeps=False)
    reader = rewriting.Reader(None, torch.ones(WIDTH, device=DEVICE), *[None] * 4, 1e-5, False)
    write = rewriting.Write(*(torch.rand(LENGTH, n, device=DEVICE) for n in (WIDTH, 1)), torch.rand(LENGTH, device=DEVICE))
    with torch.no_grad():
        rewriting.sublayer(tape, torch.rand(LENGTH, 1, WIDTH, device=DEVICE), write, reader)
    assert (tape.written, tape.kept) == ([], {})


@pytest.mark.parametrize("width", [8, WIDTH])
@pytest.mark.parametrize("rewrites", [True, False])
@torch.no_grad()
def test_steps_of_one_token_are_the_whole_text(rewrites, width):
    """One text has padding in its middle, which is zero to the tokens behind it."""
    torch.manual_seed(0)
    states, mix = numbers(ROWS, LENGTH, 2, width), numbers(4, 2, width)
    generators = [numbers(2, width), numbers(2), numbers(width), numbers(1)]
    reader = rewriting.Reader(mix, numbers(width), *generators, 1e-5, True)
    history = torch.zeros(ROWS, 3, 2, width, device=DEVICE)
    kept = torch.ones(ROWS, LENGTH, device=DEVICE)
    kept[0, 2] = 0
    written = []
    for t in range(LENGTH):
        write = rewriting.Write(numbers(ROWS, width), numbers(ROWS, 2), torch.rand(ROWS, device=DEVICE)) if rewrites else None
        found, read = rewriting.step(True, states[:, t], write, reader, rewriting.Past(history, kept[:, t].contiguous()))
        plain_state, *_ = plain(states[:, t], write, reader._replace(mix=mix[0]), True)
        assert torch.allclose(found, plain_state, atol=1e-5)
        written.append(plain_state * kept[:, t, None, None])
        x = delta_rule.over_tokens(torch.stack(written, 1), mix, None)[:, -1].sum(-2)
        _, *wanted = plain(x[:, None], None, reader._replace(mix=None), True)
        for one, other in zip(read, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-4)
        assert torch.allclose(history[:, -1], written[-1], atol=1e-5)


MODELS = {
    "scalar": {"value_channels": 1},
    "channel": {},
    "channel, two channels, repeated": {"value_channels": 2, "expand_input": False},
    "token": {"compressor": "token"},
    "paper": {"reading": "paper"},
    "write only": {"residual": "write_only"},
    "two rounds": {"num_rounds": 2},
}


@pytest.fixture
def kernels_forced(monkeypatch):
    for module in (pnn.nn.delta_stream, pnn.models.ddl, pnn.objectives):
        monkeypatch.setattr(module, "for_kernels", lambda x: True)


def decoder(**changes):
    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 7}
    model = pnn.DDLForCausalLM(pnn.DDLConfig(**size, **changes)).train()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def loss_and_gradients(model):
    model.zero_grad()
    ids = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, output_logits=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/gpu compares whole models on a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_with_kernels_is_the_plain_decoder(name, request):
    model = decoder(**MODELS[name])
    loss, plain_gradients = loss_and_gradients(model)
    request.getfixturevalue("kernels_forced")
    calls = []
    run = pnn.nn.delta_stream.run
    request.getfixturevalue("monkeypatch").setattr(pnn.nn.delta_stream, "run", lambda *a: calls.append(1) or run(*a))
    fast_loss, fast = loss_and_gradients(model)
    assert calls == [1]
    assert fast_loss == pytest.approx(loss, abs=1e-5)
    for key, wanted in plain_gradients.items():
        assert torch.allclose(fast[key], wanted, atol=2e-5 * (1 + wanted.abs().max().item())), key


@pytest.mark.skipif(ON_GPU, reason="tests/gpu compares whole models on a GPU")
@pytest.mark.parametrize("name", ["token", "two rounds"])
@torch.no_grad()
def test_steps_on_buffers_by_kernels_are_the_models_own_steps(name, request):
    model, ids = small_decoders.build(name, num_hidden_layers=1), small_decoders.tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, 5] = 0  # one step has a token that is none
    prompt, twin = (model(ids[:, :4], attention_mask=mask[:, :4]).past_key_values for _ in range(2))
    expected = [model(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=twin).logits for at in range(4, 8)]
    steps = Steps(prompt, 8)
    steps.take(prompt, mask[:, :4].bool())
    request.getfixturevalue("kernels_forced")
    calls = []
    step = rewriting.step
    request.getfixturevalue("monkeypatch").setattr(rewriting, "step", lambda *a: calls.append(1) or step(*a))
    for at, wanted in zip(range(4, 8), expected, strict=True):
        real = mask[:, at].bool()
        steps.feed(ids[:, at : at + 1], None, real[:, None])
        assert torch.allclose(steps.run(model)[real], wanted[real], atol=1e-4)
    assert len(calls) == 4 * (2 * model.config.depth + 1)
    assert steps.histories.keys() == twin.histories.keys()
    for key, history in twin.histories.items():
        assert torch.allclose(steps.histories[key], history, atol=1e-4), key


@pytest.mark.skipif(ON_GPU, reason="tests/gpu compares whole models on a GPU")
@torch.no_grad()
def test_a_compressor_makes_its_weights_once_a_pass(kernels_forced, monkeypatch):
    made, weights = [], delta_rule.ChannelCompressor.weights
    monkeypatch.setattr(delta_rule.ChannelCompressor, "weights", lambda self: made.append(self) or weights(self))
    model = decoder(num_rounds=2).eval()
    model(input_ids=torch.arange(3)[None])
    assert len(made) == len(set(made)) == 2  # the block's and the readout's


@pytest.mark.skipif(ON_GPU, reason="tests/gpu compares whole models on a GPU")
def test_what_somebody_watches_is_not_bypassed(kernels_forced):
    model = decoder()
    unwatched, _ = loss_and_gradients(model)
    for part in ("attention_residual", "mlp_residual.gate", "compress", "attention_norm", ""):
        calls = []
        handle = model.model.blocks[0].get_submodule(part).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        watched, _ = loss_and_gradients(model)
        handle.remove()
        assert calls, part
        assert watched == pytest.approx(unwatched, abs=1e-5), part
    seen = model(input_ids=torch.arange(5)[None], output_attentions=True, output_hidden_states=True)
    assert (len(seen.attentions), len(seen.hidden_states)) == (1, 2)
    _, wanted = loss_and_gradients(model)
    model.gradient_checkpointing_enable()
    _, checkpointed = loss_and_gradients(model)
    for key, value in wanted.items():
        assert torch.allclose(checkpointed[key], value, atol=2e-5 * (1 + value.abs().max().item())), key
