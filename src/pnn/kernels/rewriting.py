"""One pass over the state of a Deep Delta decoder between two branches: rewrite it, and read it for the next sublayer.

    rewrite   k = b / √(‖b‖² + ε²),   X⁺ = X + β k (vᵀ − kᵀX)           b: the branch's output; without erasure: X + β k vᵀ
    read      x = Σ_sj w_sj ⊙ X⁺_j[t − s],   c = n ⊙ x / √(mean x² + ε)
              v⁺ = 4σ(W x + a) or W c,   β⁺ = 2σ(w·c + a')               what the next sublayer will write, and how much of it

X is (tokens, width, channels), c·d numbers a token against the branch's d: moving it is the cost, so it is read once and
written once. (The channels of a feature lie together, because one thread then holds them all and sums over them by itself.)
A program walks over neighbouring tokens with the weights in registers. In the backward pass it walks from the last to the
first, makes X⁺ again, and adds up its share of the weights' gradients in registers; a sum over all shares finishes them.

Sums over a token's features are what a program waits for, so the forward pass keeps their results (1/‖b‖, vᵀ − kᵀX,
1/√(mean x² + ε): a few numbers a token) and the backward pass needs only two sums of its own. Kept besides are b of every
sublayer, and X at every few of them only: the states between are made again, which moves less than it saves (see `Tape`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 2048
TAPS = 4  # tokens of a compressor over tokens
STATES_KEPT_EVERY = 4  # sublayers
STAGES = tl.constexpr(2)  # tokens in flight: the next one is fetched while one is computed


class Launch(NamedTuple):
    """How a pass is spread over a GPU. Programs are counted for each of its multiprocessors."""

    warps: int
    programs: int
    registers: int | None = None  # a thread's, at most; None: as the compiler likes


FORWARD = {(1, 1): Launch(4, 16), (4, 1): Launch(8, 8), (4, 4): Launch(16, 4)}  # by channels and taps
BACKWARD = {(1, 1): Launch(8, 3), (4, 1): Launch(16, 1, 128), (4, 4): Launch(16, 1, 128)}  # few: each has gradients to add up


def _launch(table: dict[tuple[int, int], Launch], channels: int, taps: int) -> Launch:
    return table.get((channels, taps)) or table[(4 if channels > 1 else 1, taps)]


def takes(width: int, channels: int, taps: int) -> bool:
    return width <= WIDEST and channels in (1, 2, 4) and taps in (1, TAPS)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _rewritten_at(
    states, branches, betas, values, token, tokens, channels, columns, width: tl.constexpr, count: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr,
):  # fmt: skip
    """(X⁺, rounded as it is stored; 1/‖b‖; what is written along k) of a token, zero beyond the last."""
    exists = token < tokens
    real = (columns < width) & exists
    at = token * (count * width) + columns[:, None] * count + channels[None, :]
    state = tl.load(states + at, mask=real[:, None], other=0.0).to(tl.float32)
    inverse = 0.0
    written = tl.zeros([count], tl.float32)
    if rewrites:
        branch = tl.load(branches + token * width + columns, mask=real, other=0.0).to(tl.float32)
        beta = tl.load(betas + token, mask=exists, other=0.0)
        written = tl.load(values + token * count + channels, mask=exists, other=0.0)
        inverse = 1 / tl.sqrt(tl.sum(branch * branch, 0) + 1e-10)  # ε² of a direction's length
        if erase:
            written -= inverse * tl.sum(state * branch[:, None], 0)
        state = _overwritten(state, branch, inverse, beta, written).to(states.dtype.element_ty).to(tl.float32)
    return state, inverse, written


@triton.jit
def _overwritten(state, branch, inverse, beta, written):
    """X + β k (…)ᵀ of one token. state: (d, c), branch: (d,), written: (c,)."""
    return state + (branch * inverse)[:, None] * (beta * written)[None, :]


@triton.jit
def _make_again(
    states, branches, betas, inverses, writtens, new_states, tokens,
    each: tl.constexpr, width: tl.constexpr, block: tl.constexpr, count: tl.constexpr,
):  # fmt: skip
    """X⁺ from what was kept of the forward pass: no sum to wait for."""
    channels = tl.arange(0, count)
    columns = tl.arange(0, block)
    for turn in range(each):
        token = tl.program_id(0).to(tl.int64) * each + turn
        exists = token < tokens
        real = (columns < width) & exists
        at = token * (count * width) + columns[:, None] * count + channels[None, :]
        state = tl.load(states + at, mask=real[:, None], other=0.0).to(tl.float32)
        branch = tl.load(branches + token * width + columns, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + token, mask=exists, other=0.0)
        beta = tl.load(betas + token, mask=exists, other=0.0)
        written = tl.load(writtens + token * count + channels, mask=exists, other=0.0)
        state = _overwritten(state, branch, inverse, beta, written)
        tl.store(new_states + at, state.to(new_states.dtype.element_ty), mask=real[:, None])


@triton.jit
def _forward(
    states, branches, values, betas, mix, norm, value_weight, value_bias, gate_weight, gate_bias,
    new_states, compressed, contexts, new_values, new_betas, inverses, writtens, norm_inverses,
    tokens, row_length, eps, each: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, count: tl.constexpr, taps: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, count)
    columns = tl.arange(0, block)
    real = columns < width
    inside = real[:, None]
    within = columns[:, None] * count + channels[None, :]
    first = tl.program_id(0).to(tl.int64) * each
    scale = tl.load(norm + columns, mask=real, other=0.0).to(tl.float32)
    if count > 1:
        mix0 = tl.load(mix + within, mask=inside, other=0.0).to(tl.float32)
    if taps > 1:
        mix1 = tl.load(mix + count * width + within, mask=inside, other=0.0).to(tl.float32)
        mix2 = tl.load(mix + 2 * count * width + within, mask=inside, other=0.0).to(tl.float32)
        mix3 = tl.load(mix + 3 * count * width + within, mask=inside, other=0.0).to(tl.float32)
        before1 = tl.zeros([block, count], tl.float32)
        before2 = tl.zeros([block, count], tl.float32)
        before3 = tl.zeros([block, count], tl.float32)
        place = first % row_length  # in its row
        if place >= 1:
            before1, _, _ = _rewritten_at(
                states, branches, betas, values, first - 1, tokens, channels, columns, width, count, rewrites, erase
            )
        if place >= 2:
            before2, _, _ = _rewritten_at(
                states, branches, betas, values, first - 2, tokens, channels, columns, width, count, rewrites, erase
            )
        if place >= 3:
            before3, _, _ = _rewritten_at(
                states, branches, betas, values, first - 3, tokens, channels, columns, width, count, rewrites, erase
            )
    if generates:
        to_value = tl.load(value_weight + within, mask=inside, other=0.0).to(tl.float32)
        to_gate = tl.load(gate_weight + columns, mask=real, other=0.0).to(tl.float32)
        gate_shift = tl.load(gate_bias).to(tl.float32)
        if from_state:
            value_shift = tl.load(value_bias + channels).to(tl.float32)
    for turn in tl.range(each, num_stages=STAGES):
        token = first + turn
        exists = token < tokens
        real = (columns < width) & exists
        inside = real[:, None]
        state, inverse, written = _rewritten_at(
            states, branches, betas, values, token, tokens, channels, columns, width, count, rewrites, erase
        )
        if rewrites:
            tl.store(new_states + token * (count * width) + within, state.to(new_states.dtype.element_ty), mask=inside)
            tl.store(inverses + token, inverse, mask=exists)
            tl.store(writtens + token * count + channels, written, mask=exists)
        if count > 1:
            x = tl.sum(state * mix0, 1)
        else:
            x = tl.sum(state, 1)
        if taps > 1:
            if token % row_length == 0:
                before1 = tl.zeros([block, count], tl.float32)
                before2 = tl.zeros([block, count], tl.float32)
                before3 = tl.zeros([block, count], tl.float32)
            x += tl.sum(before1 * mix1 + before2 * mix2 + before3 * mix3, 1)
            before3 = before2
            before2 = before1
            before1 = state
            x = x.to(compressed.dtype.element_ty).to(tl.float32)
            tl.store(compressed + token * width + columns, x.to(compressed.dtype.element_ty), mask=real)
        norm_inverse = 1 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        tl.store(norm_inverses + token, norm_inverse, mask=exists)
        c = x * norm_inverse * scale
        tl.store(contexts + token * width + columns, c.to(contexts.dtype.element_ty), mask=real)
        if generates:
            if from_state:
                v = 4 * _sigmoid(tl.sum(to_value * x[:, None], 0) + value_shift)
            else:
                v = tl.sum(to_value * c[:, None], 0)
            tl.store(new_values + token * count + channels, v, mask=exists)
            tl.store(new_betas + token, 2 * _sigmoid(tl.sum(to_gate * c, 0) + gate_shift), mask=exists)


@triton.jit
def _read_backward(
    x, inverse, scale, grad, gate_gradient, value_gradient, to_gate, to_value,
    width: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr,
):  # fmt: skip
    """(∂L/∂x, x / √(mean x² + ε), all of ∂L/∂c) of one token. `inverse`: 1 / √(mean x² + ε)."""
    unit = x * inverse
    if generates:
        grad += gate_gradient * to_gate
        if not from_state:
            grad += tl.sum(value_gradient[None, :] * to_value, 1)
    scaled = grad * scale
    grad_x = inverse * (scaled - unit * (tl.sum(scaled * unit, 0) / width))
    if generates and from_state:
        grad_x += tl.sum(value_gradient[None, :] * to_value, 1)
    return grad_x, unit, grad


@triton.jit
def _generator_gradients(
    new_values, new_betas, grad_values, grad_betas, token, exists, channels, count: tl.constexpr, from_state: tl.constexpr,
):  # fmt: skip
    """From ∂L/∂v⁺ and ∂L/∂β⁺ to the gradients before the sigmoids."""
    value_gradient = tl.load(grad_values + token * count + channels, mask=exists, other=0.0)
    if from_state:
        v = tl.load(new_values + token * count + channels, mask=exists, other=0.0)
        value_gradient = value_gradient * v * (1 - v / 4)
    beta = tl.load(new_betas + token, mask=exists, other=0.0)
    return tl.load(grad_betas + token, mask=exists, other=0.0) * beta * (1 - beta / 2), value_gradient


@triton.jit
def _grad_x_at(
    compressed, norm_inverses, grad_contexts, new_values, new_betas, grad_values, grad_betas, scale, to_gate, to_value, token,
    tokens, channels, columns, width: tl.constexpr, count: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr,
):  # fmt: skip
    """∂L/∂x of a token that belongs to another program; zero beyond the last."""
    exists = token < tokens
    real = (columns < width) & exists
    x = tl.load(compressed + token * width + columns, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(grad_contexts + token * width + columns, mask=real, other=0.0).to(tl.float32)
    gate_gradient = 0.0
    value_gradient = tl.zeros([count], tl.float32)
    if generates:
        gate_gradient, value_gradient = _generator_gradients(
            new_values, new_betas, grad_values, grad_betas, token, exists, channels, count, from_state
        )
    inverse = tl.load(norm_inverses + token, mask=exists, other=0.0)
    grad_x, _, _ = _read_backward(
        x, inverse, scale, grad, gate_gradient, value_gradient, to_gate, to_value, width, generates, from_state
    )
    return grad_x


@triton.jit
def _backward(
    states, branches, values, betas, inverses, writtens, mix, norm, value_weight, gate_weight,
    compressed, norm_inverses, new_values, new_betas,
    grad_new_states, grad_contexts, grad_new_values, grad_new_betas,
    grad_states, grad_branches, grad_values, grad_betas,
    mix_shares, norm_shares, value_shares, value_bias_shares, gate_shares, gate_bias_shares,
    tokens, row_length, each: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, count: tl.constexpr, taps: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr, has_grad: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, count)
    columns = tl.arange(0, block)
    real = columns < width
    inside = real[:, None]
    within = columns[:, None] * count + channels[None, :]
    first = program * each
    scale = tl.load(norm + columns, mask=real, other=0.0).to(tl.float32)
    norm_total = tl.zeros([block], tl.float32)
    to_gate = tl.zeros([block], tl.float32)
    to_value = tl.zeros([block, count], tl.float32)
    if generates:
        to_gate = tl.load(gate_weight + columns, mask=real, other=0.0).to(tl.float32)
        to_value = tl.load(value_weight + within, mask=inside, other=0.0).to(tl.float32)
        gate_total = tl.zeros([block], tl.float32)
        value_total = tl.zeros([block, count], tl.float32)
        gate_bias_total = 0.0
        value_bias_total = tl.zeros([count], tl.float32)
    if count > 1:
        mix0 = tl.load(mix + within, mask=inside, other=0.0).to(tl.float32)
        mix0_total = tl.zeros([block, count], tl.float32)
    if taps > 1:
        mix1 = tl.load(mix + count * width + within, mask=inside, other=0.0).to(tl.float32)
        mix2 = tl.load(mix + 2 * count * width + within, mask=inside, other=0.0).to(tl.float32)
        mix3 = tl.load(mix + 3 * count * width + within, mask=inside, other=0.0).to(tl.float32)
        mix1_total = tl.zeros([block, count], tl.float32)
        mix2_total = tl.zeros([block, count], tl.float32)
        mix3_total = tl.zeros([block, count], tl.float32)
        after1 = tl.zeros([block], tl.float32)  # ∂L/∂x of the tokens after this one, in its row
        after2 = tl.zeros([block], tl.float32)
        after3 = tl.zeros([block], tl.float32)
        left = row_length - 1 - (first + each - 1) % row_length  # tokens of the row after this program's last
        if left >= 1:
            after1 = _grad_x_at(
                compressed, norm_inverses, grad_contexts, new_values, new_betas, grad_new_values, grad_new_betas, scale,
                to_gate, to_value, first + each, tokens, channels, columns, width, count, generates, from_state,
            )  # fmt: skip
        if left >= 2:
            after2 = _grad_x_at(
                compressed, norm_inverses, grad_contexts, new_values, new_betas, grad_new_values, grad_new_betas, scale,
                to_gate, to_value, first + each + 1, tokens, channels, columns, width, count, generates, from_state,
            )  # fmt: skip
        if left >= 3:
            after3 = _grad_x_at(
                compressed, norm_inverses, grad_contexts, new_values, new_betas, grad_new_values, grad_new_betas, scale,
                to_gate, to_value, first + each + 2, tokens, channels, columns, width, count, generates, from_state,
            )  # fmt: skip
    for turn in tl.range(each, num_stages=STAGES):
        token = first + each - 1 - turn
        exists = token < tokens
        real = (columns < width) & exists
        inside = real[:, None]
        at = token * (count * width) + within
        state = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
        grad_state = tl.zeros([block, count], tl.float32)
        if has_grad:
            grad_state = tl.load(grad_new_states + at, mask=inside, other=0.0).to(tl.float32)
        new_state = state
        if rewrites:
            branch = tl.load(branches + token * width + columns, mask=real, other=0.0).to(tl.float32)
            beta = tl.load(betas + token, mask=exists, other=0.0)
            inverse = tl.load(inverses + token, mask=exists, other=0.0)
            written = tl.load(writtens + token * count + channels, mask=exists, other=0.0)
            k = branch * inverse
            new_state = _overwritten(state, branch, inverse, beta, written).to(states.dtype.element_ty).to(tl.float32)
        if taps > 1:
            x = tl.load(compressed + token * width + columns, mask=real, other=0.0).to(tl.float32)
        elif count > 1:
            x = tl.sum(new_state * mix0, 1)
        else:
            x = tl.sum(new_state, 1)
        grad = tl.load(grad_contexts + token * width + columns, mask=real, other=0.0).to(tl.float32)
        gate_gradient = 0.0
        value_gradient = tl.zeros([count], tl.float32)
        if generates:
            gate_gradient, value_gradient = _generator_gradients(
                new_values, new_betas, grad_new_values, grad_new_betas, token, exists, channels, count, from_state
            )
        norm_inverse = tl.load(norm_inverses + token, mask=exists, other=0.0)
        grad_x, unit, grad_context = _read_backward(
            x, norm_inverse, scale, grad, gate_gradient, value_gradient, to_gate, to_value, width, generates, from_state
        )
        if count > 1:
            grad_state += mix0 * grad_x[:, None]
            mix0_total += new_state * grad_x[:, None]
        else:
            grad_state += grad_x[:, None]
        if taps > 1:
            if token % row_length == row_length - 1:
                after1 = tl.zeros([block], tl.float32)
                after2 = tl.zeros([block], tl.float32)
                after3 = tl.zeros([block], tl.float32)
            grad_state += mix1 * after1[:, None] + mix2 * after2[:, None] + mix3 * after3[:, None]
            mix1_total += new_state * after1[:, None]
            mix2_total += new_state * after2[:, None]
            mix3_total += new_state * after3[:, None]
            after3 = after2
            after2 = after1
            after1 = grad_x
        norm_total += grad_context * unit
        if generates:
            gate_total += gate_gradient * unit  # times the norm's scale at the end
            gate_bias_total += gate_gradient
            if from_state:
                value_total += value_gradient[None, :] * x[:, None]
                value_bias_total += value_gradient
            else:
                value_total += value_gradient[None, :] * unit[:, None]
        if rewrites:
            along = tl.sum(grad_state * k[:, None], 0)
            grad_value = beta * along
            grad_beta = tl.sum(written * along, 0)
            grad_k = tl.sum(grad_state * (beta * written)[None, :], 1)
            across = beta * grad_beta  # kᵀ ∂L/∂k
            if erase:
                grad_state -= grad_value[None, :] * k[:, None]
                grad_k -= tl.sum(state * grad_value[None, :], 1)
                readout = tl.load(values + token * count + channels, mask=exists, other=0.0) - written
                across -= tl.sum(grad_value * readout, 0)
            grad_branch = inverse * (grad_k - k * across)
            tl.store(grad_branches + token * width + columns, grad_branch.to(grad_branches.dtype.element_ty), mask=real)
            tl.store(grad_values + token * count + channels, grad_value, mask=exists)
            tl.store(grad_betas + token, grad_beta, mask=exists)
        tl.store(grad_states + at, grad_state.to(grad_states.dtype.element_ty), mask=inside)
    real = columns < width
    inside = real[:, None]
    tl.store(norm_shares + program * width + columns, norm_total, mask=real)
    if count > 1:
        share = mix_shares + program * (taps * count * width) + within
        tl.store(share, mix0_total, mask=inside)
        if taps > 1:
            tl.store(share + count * width, mix1_total, mask=inside)
            tl.store(share + 2 * count * width, mix2_total, mask=inside)
            tl.store(share + 3 * count * width, mix3_total, mask=inside)
    if generates:
        tl.store(gate_shares + program * width + columns, gate_total * scale, mask=real)
        tl.store(gate_bias_shares + program, gate_bias_total)
        if from_state:
            tl.store(value_bias_shares + program * count + channels, value_bias_total)
        else:
            value_total = value_total * scale[:, None]
        tl.store(value_shares + program * (count * width) + within, value_total, mask=inside)


# Calling them --------------------------------------------------------------------------------------------------------


class Write(NamedTuple):
    """What a sublayer writes: its branch's output b (tokens, d), values v (tokens, c), gates β (tokens,)."""

    branch: Tensor
    values: Tensor
    betas: Tensor


class Reader(NamedTuple):
    """What reads the state: the compressor's weights (d, c) or (taps, d, c), None for one channel; the norm's, (d,); and the
    next sublayer's generators (d, c), (c,), (d,) and (1,), None at the end. `from_state`: values are 4σ(W x + a), else W c."""

    mix: Tensor | None
    norm: Tensor
    value: Tensor | None
    value_bias: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    eps: float
    from_state: bool

    @property
    def taps(self) -> int:
        return len(self.mix) if self.mix is not None and self.mix.dim() == 3 else 1


class Read(NamedTuple):
    """What was read: c for the next branch, and the next sublayer's values and gates."""

    context: Tensor
    values: Tensor | None
    betas: Tensor | None


def _each(tokens: int, device: torch.device, launch: Launch) -> int:
    """Tokens of a program."""
    if device.type != "cuda":
        return triton.cdiv(tokens, 3)  # in Triton's interpreter: several programs, of uneven lengths
    return triton.cdiv(tokens, torch.cuda.get_device_properties(device).multi_processor_count * launch.programs)


class Kept(NamedTuple):
    """Sums of the forward pass: 1/‖b‖ (tokens,), what was written along k (tokens, c), 1/√(mean x² + ε) (tokens,)."""

    inverses: Tensor | None
    writtens: Tensor | None
    norm_inverses: Tensor


def _run_forward(
    states: Tensor, write: Write | None, reader: Reader, erase: bool, row_length: int
) -> tuple[Tensor, Tensor | None, Read, Kept]:
    """(X⁺, x where the compressor looks over tokens, what was read, what is kept)."""
    tokens, width, channels = states.shape

    def numbers(*shape: int, wanted: bool = True) -> Tensor | None:
        return states.new_empty(shape, dtype=torch.float32) if wanted else None

    writes, generates = write is not None, reader.gate is not None
    new_states = torch.empty_like(states) if writes else states
    context = states.new_empty(tokens, width)
    compressed = torch.empty_like(context) if reader.taps > 1 else None
    values, betas = numbers(tokens, channels, wanted=generates), numbers(tokens, wanted=generates)
    inverses, writtens = numbers(tokens, wanted=writes), numbers(tokens, channels, wanted=writes)
    norm_inverses = states.new_empty(tokens, dtype=torch.float32)
    launch = _launch(FORWARD, channels, reader.taps)
    each = _each(tokens, states.device, launch)
    _forward[(triton.cdiv(tokens, each),)](
        states, *_or(states, *(write or [None] * 3)), *_or(states, *reader[:6]),
        new_states, *_or(states, compressed, context, values, betas, inverses, writtens, norm_inverses),
        tokens, row_length, reader.eps, each=each,
        width=width, block=triton.next_power_of_2(width), count=channels, taps=reader.taps,
        rewrites=writes, erase=erase, generates=generates, from_state=reader.from_state, num_warps=launch.warps,
    )  # fmt: skip
    return new_states, compressed, Read(context, values, betas), Kept(inverses, writtens, norm_inverses)


def _or(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """What is not there is passed as something else, which is not touched."""
    return [stand_in if tensor is None else tensor for tensor in tensors]


class Written(NamedTuple):
    """What makes a state again from the one before."""

    branch: Tensor
    betas: Tensor
    inverses: Tensor
    writtens: Tensor

    def onto(self, states: Tensor) -> Tensor:
        tokens, width, channels = states.shape
        out = torch.empty_like(states)
        launch = _launch(FORWARD, channels, 1)
        each = _each(tokens, states.device, launch)
        _make_again[(triton.cdiv(tokens, each),)](
            states, *self, out, tokens,
            each=each, width=width, block=triton.next_power_of_2(width), count=channels, num_warps=launch.warps,
        )  # fmt: skip
        return out


class Tape:
    """The states of one forward pass, for the backward pass: some are kept, those between are made again when they are asked
    for, from the last kept one on. Backward asks from the end, so each is made once."""

    def __init__(self, erase: bool, row_length: int, every: int = STATES_KEPT_EVERY, keeps: bool = True):
        self.erase, self.row_length, self.every, self.keeps = erase, row_length, every, keeps
        self.written: list[Written] = []
        self.kept: dict[int, Tensor] = {}

    def add(self, state: Tensor, write: Write, sums: Kept) -> int:
        """A state and what was written to it; returns its number. Without history: a tape is no part of the graph."""
        number = len(self.written)
        if number % self.every == 0:
            self.kept[number] = state.detach()
        assert sums.inverses is not None
        assert sums.writtens is not None
        self.written.append(Written(write.branch.detach(), write.betas.detach(), sums.inverses, sums.writtens))
        return number

    def take(self, number: int) -> Tensor:
        """A state, for the last time."""
        start = max((kept for kept in self.kept if kept <= number), default=None)
        if start is None:
            raise RuntimeError("the states of this pass are gone: a second backward pass needs another forward pass")
        for at in range(start, number):
            self.kept[at + 1] = self.written[at].onto(self.kept[at])
        return self.kept.pop(number)


class _Sublayer(torch.autograd.Function):
    """Rewrite, then read; without a write, only read."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, settings: tuple[float, bool], states: Tensor, *inputs: Tensor | None) -> Any:
        branch, values, betas, *weights = inputs
        write = None if branch is None else Write(branch, values, betas)  # type: ignore[arg-type]
        reader = Reader(*weights, *settings)  # type: ignore[arg-type,call-arg]
        new_states, compressed, read, sums = _run_forward(states, write, reader, tape.erase, tape.row_length)
        ctx.tape, ctx.settings, ctx.number = tape, settings, None
        if write is not None and tape.keeps:  # (needs_input_grad is true of parameters in evaluation too)
            ctx.number = tape.add(states, write, sums)
        first = states if write is None else None
        ctx.save_for_backward(first, branch, values, betas, *weights, compressed, read.values, read.betas, *sums)
        ctx.set_materialize_grads(False)
        return (states.view_as(states) if write is None else new_states), *read

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad_states, grad_context, grad_values, grad_betas = grads
        states, branch, values, betas, *rest = ctx.saved_tensors
        weights, (compressed, new_values, new_betas), sums = rest[:6], rest[6:9], Kept(*rest[9:])
        if states is None:
            states = ctx.tape.take(ctx.number)
        if grad_context is None:
            grad_context = states.new_zeros(states.shape[:2])
        if new_betas is not None:
            grad_values = torch.zeros_like(new_values) if grad_values is None else grad_values.contiguous()
            grad_betas = torch.zeros_like(new_betas) if grad_betas is None else grad_betas.contiguous()
        found = _run_backward(
            states,
            None if branch is None else Write(branch, values, betas),
            Reader(*weights, *ctx.settings),
            ctx.tape,
            sums,
            compressed,
            Read(grad_context.contiguous(), new_values, new_betas),
            (None if grad_states is None else grad_states.contiguous(), grad_values, grad_betas),
        )
        return None, None, *found


def _run_backward(
    states: Tensor,
    write: Write | None,
    reader: Reader,
    tape: Tape,
    sums: Kept,
    compressed: Tensor | None,
    read: Read,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> list[Tensor | None]:
    """Gradients of the state, of what was written, and of the reader's weights. `read.context` is the gradient of c, `grads`
    those of X⁺, v⁺ and β⁺."""
    tokens, width, channels = states.shape
    launch = _launch(BACKWARD, channels, reader.taps)
    each = _each(tokens, states.device, launch)
    programs = triton.cdiv(tokens, each)

    def shares(like: Tensor | None) -> Tensor | None:
        return None if like is None else states.new_empty(programs, *like.shape, dtype=torch.float32)

    grad_states = torch.empty_like(states)
    grad_write = [None] * 3 if write is None else [torch.empty_like(part) for part in write]
    parts = [shares(part) for part in reader[:6]]
    grad_new_states, grad_values, grad_betas = grads
    _backward[(programs,)](
        states, *_or(states, *(write or [None] * 3), sums.inverses, sums.writtens),
        *_or(states, reader.mix, reader.norm, reader.value, reader.gate),
        *_or(states, compressed, sums.norm_inverses, read.values, read.betas),
        *_or(states, grad_new_states, read.context, grad_values, grad_betas),
        grad_states, *_or(states, *grad_write), *_or(states, *parts),
        tokens, tape.row_length, each=each,
        width=width, block=triton.next_power_of_2(width), count=channels, taps=reader.taps,
        rewrites=write is not None, erase=tape.erase, generates=read.betas is not None, from_state=reader.from_state,
        has_grad=grad_new_states is not None, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    summed = [
        None if share is None or part is None else share.sum(0).to(part.dtype)
        for share, part in zip(parts, reader[:6], strict=True)
    ]
    return [grad_states, *grad_write, *summed]


def sublayer(tape: Tape, states: Tensor, write: Write | None, reader: Reader) -> tuple[Tensor, Read]:
    """states: (tokens, d, c) → (X⁺, what was read). Without a write the state stays as it is."""
    parts = (None, None, None) if write is None else tuple(part.contiguous() for part in write)
    weights = tuple(None if part is None else part.contiguous() for part in reader[:6])
    new_states, *read = _Sublayer.apply(tape, (reader.eps, reader.from_state), states.contiguous(), *parts, *weights)
    return new_states, Read(*read)
