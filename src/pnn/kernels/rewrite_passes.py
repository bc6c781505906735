"""Kernels of `rewriting`: one pass over the state of a Deep Delta decoder between two branches, forward and backward.

    rewrite   k = b / √(‖b‖² + ε²),   X⁺ = X + β k (vᵀ − kᵀX)           b: the branch's output; without erasure: X + β k vᵀ
    read      x = Σ_sj w_sj ⊙ X⁺_j[t − s],   c = n ⊙ x / √(mean x² + ε)
              v⁺ = 4σ(W x + a) or W c,   β⁺ = 2σ(w·c + a')               what the next sublayer will write, and how much of it

X is (tokens, channels, width): c·d numbers a token against the branch's d. Moving it is the cost, so it is read once and
written once. A program walks over neighbouring tokens, forward to the last and backward to the first, with a vector of the
width for each channel in registers. What it waits for are sums over the width: the forward pass has two rounds of them, all
sums of a round at once, and keeps their results (1/‖b‖, vᵀ − kᵀX, 1/√(mean x² + ε): a few numbers a token), so that the
backward pass needs only two of its own. Gradients of weights are added up in registers, a share for each program.

A compressor over tokens looks back. Going forward, a state's part in the x of the next tokens is carried along; going
backward, the gradients of the next tokens' x are. A program therefore starts a few tokens outside its own ones. In a step of
one token for each text the states before it come from a history instead, which is moved on by a token in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pnn.kernels.rows import (
    dots,
    load,
    mixed,
    numbers,
    plus,
    plus_by_row,
    plus_inner,
    plus_outer,
    product,
    rounded,
    scaled,
    store,
    sums,
    zeros,
)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def forward(
    states, branches, values, betas, mix, norm, value_weight, value_bias, gate_weight, gate_bias,
    new_states, compressed, contexts, new_values, new_betas, inverses, writtens, norm_inverses, histories, kept,
    tokens, row_length, eps, each: tl.constexpr, stages: tl.constexpr,
    width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr, count: tl.constexpr, taps: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    """`stages`: tokens in flight; the next ones are fetched while one is computed. `steps`: every token is the next one of
    another text, whose last states are its history, the oldest first; a token that is not `kept` (0) is as if it were zero."""
    columns = tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * each
    outside: tl.constexpr = 0 if steps else taps - 1
    if outside > 0:
        carried = zeros(outside * pieces, block)  # to x of the next tokens
    scale = load(norm, columns, True, 1, width, pieces, block)
    if count > 1:
        weights = load(mix, columns, True, taps * count, width, pieces, block)
    if generates:
        to_gate = load(gate_weight, columns, True, 1, width, pieces, block)
        to_values = load(value_weight, columns, True, count, width, pieces, block)
    for turn in tl.range(-outside, each, num_stages=stages):
        token = first + turn
        exists = (token >= 0) & (token < tokens)
        own = exists & (turn >= 0)
        at = token * width
        state = load(states + count * at, columns, exists, count, width, pieces, block)
        if steps:
            size: tl.constexpr = count * pieces
            history = histories + token * (taps - 1) * count * width
            before = load(history, columns, exists, (taps - 1) * count, width, pieces, block)
            earlier = mixed(weights, before[:size], taps - 1, pieces)
            for tap in tl.static_range(1, taps - 1):
                older = before[(taps - 1 - tap) * size : (taps - tap) * size]
                earlier = plus(earlier, mixed(weights, older, tap, pieces), 1.0)
            tl.debug_barrier()  # threads share the numbers of a short row: all have read before one of them writes
            store(history, columns, before[size:], exists, width, pieces, block)
        if rewrites:
            branch = load(branches + at, columns, exists, 1, width, pieces, block)
            beta = tl.load(betas + token, mask=exists, other=0.0)
            written = numbers(values + token * count, exists, count)
            if erase:
                found = sums(dots(branch, branch) + dots(state, branch))
            else:
                found = sums(dots(branch, branch))
            inverse = 1 / tl.sqrt(found[0] + 1e-10)  # ε² of a direction's length
            if erase:
                written = plus(written, found[1:], -inverse)
            state = plus_outer(state, scaled(written, beta * inverse), branch)
            store(new_states + count * at, columns, state, own, width, pieces, block)
            tl.store(inverses + token, inverse, mask=own)
            for j in tl.static_range(count):
                tl.store(writtens + token * count + j, written[j], mask=own)
        if steps:
            state = scaled(state, tl.load(kept + token, mask=exists, other=0.0))
        if count > 1:
            x = mixed(weights, state, 0, pieces)
        else:
            x = state
        if steps:
            x = plus(x, earlier, 1.0)
            store(history + (taps - 2) * count * width, columns, state, exists, width, pieces, block)
        elif taps > 1:
            continues = (token % row_length != 0).to(tl.float32)
            x = plus(x, carried[:pieces], continues)
            further = ()
            for tap in tl.static_range(1, taps - 1):
                part = mixed(weights, state, tap, pieces)
                further = further + plus(part, carried[tap * pieces : (tap + 1) * pieces], continues)
            carried = further + mixed(weights, state, taps - 1, pieces)
            store(compressed + at, columns, x, own, width, pieces, block)
        c = product(x, scale)
        if generates:
            if from_state:
                found = sums(dots(x, x) + dots(to_gate, c) + dots(to_values, x))
            else:
                found = sums(dots(x, x) + dots(to_gate, c) + dots(to_values, c))
        else:
            found = sums(dots(x, x))
        norm_inverse = 1 / tl.sqrt(found[0] / width + eps)
        tl.store(norm_inverses + token, norm_inverse, mask=own)
        store(contexts + at, columns, scaled(c, norm_inverse), own, width, pieces, block)
        if generates:
            tl.store(new_betas + token, 2 * _sigmoid(found[1] * norm_inverse + tl.load(gate_bias)), mask=own)
            for j in tl.static_range(count):
                if from_state:
                    value = 4 * _sigmoid(found[2 + j] + tl.load(value_bias + j))
                else:
                    value = found[2 + j] * norm_inverse
                tl.store(new_values + token * count + j, value, mask=own)


@triton.jit
def backward(
    states, branches, values, betas, inverses, writtens, mix, norm, value_weight, gate_weight,
    compressed, norm_inverses, new_values, new_betas,
    grad_new_states, grad_contexts, grad_new_values, grad_new_betas,
    grad_states, grad_branches, grad_values, grad_betas, grad_compressed, shares,
    tokens, row_length, each: tl.constexpr, stages: tl.constexpr,
    width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr, count: tl.constexpr, taps: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr, has_grad: tl.constexpr,
):  # fmt: skip
    """A program's share of the weights' gradients: the norm's, the values', the gate's, the biases of gate and values, and the
    compressor's, unless it looks over tokens (see `mix_backward`)."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    first = program * each
    norm_total = zeros(pieces, block)
    gate_total = zeros(pieces, block)
    value_totals = zeros(count * pieces, block)
    if taps == 1:
        mix_totals = zeros(count * pieces, block)
    else:
        after = zeros((taps - 1) * pieces, block)  # ∂L/∂x of the next tokens of the row
    bias_totals = (0.0,)
    for _ in tl.static_range(count):
        bias_totals = bias_totals + (0.0,)
    scale = load(norm, columns, True, 1, width, pieces, block)
    if count > 1:
        weights = load(mix, columns, True, taps * count, width, pieces, block)
    if generates:
        to_gate = load(gate_weight, columns, True, 1, width, pieces, block)
        to_values = load(value_weight, columns, True, count, width, pieces, block)
    for turn in tl.range(1 - taps, each, num_stages=stages):
        token = first + each - 1 - turn
        exists = token < tokens
        own = exists & (turn >= 0)
        mine = own.to(tl.float32)
        at = token * width
        state = load(states + count * at, columns, own, count, width, pieces, block)
        if has_grad:
            grads = load(grad_new_states + count * at, columns, own, count, width, pieces, block)
        else:
            grads = zeros(count * pieces, block)
        new_state = state
        if rewrites:
            beta = tl.load(betas + token, mask=own, other=0.0)
            inverse = tl.load(inverses + token, mask=own, other=0.0)
            written = numbers(writtens + token * count, own, count)
            k = scaled(load(branches + at, columns, own, 1, width, pieces, block), inverse)
            new_state = plus_outer(state, scaled(written, beta), k)
        if taps > 1:
            x = load(compressed + at, columns, exists, 1, width, pieces, block)
        elif count > 1:
            x = mixed(weights, new_state, 0, pieces)
        else:
            x = new_state
        # ∂L/∂x, through the norm and the generators
        norm_inverse = tl.load(norm_inverses + token, mask=exists, other=0.0)
        unit = scaled(x, norm_inverse)
        grad = load(grad_contexts + at, columns, exists, 1, width, pieces, block)
        if generates:
            next_beta = tl.load(new_betas + token, mask=exists, other=0.0)
            gate_gradient = tl.load(grad_new_betas + token, mask=exists, other=0.0) * next_beta * (1 - next_beta / 2)
            value_gradients = numbers(grad_new_values + token * count, exists, count)
            if from_state:
                next_values = numbers(new_values + token * count, exists, count)
                through = ()
                for j in tl.static_range(count):
                    through = through + (value_gradients[j] * next_values[j] * (1 - next_values[j] / 4),)
                value_gradients = through
            grad = plus(grad, to_gate, gate_gradient)
            if not from_state:
                grad = plus_inner(grad, value_gradients, to_values)
        weighted = product(grad, scale)
        dot = sums(dots(weighted, unit))[0]
        grad_x = plus(scaled(weighted, norm_inverse), unit, -norm_inverse * dot / width)
        norm_total = plus(norm_total, product(grad, unit), mine)
        if generates:
            gate_total = plus(gate_total, unit, mine * gate_gradient)  # times the norm's scale at the end
            bias_totals = plus(bias_totals, (gate_gradient,) + value_gradients, mine)
            if from_state:
                value_totals = plus_outer(value_totals, scaled(value_gradients, mine), x)
                grad_x = plus_inner(grad_x, value_gradients, to_values)
            else:
                value_totals = plus_outer(value_totals, scaled(value_gradients, mine), unit)
        # ∂L/∂X⁺, through the compressor
        if count == 1:
            grads = plus(grads, grad_x, 1.0)
        else:
            if taps == 1:
                mix_totals = plus_by_row(mix_totals, new_state, grad_x, 0, 0)
                grads = plus_by_row(grads, weights, grad_x, 0, 0)
            else:
                store(grad_compressed + at, columns, grad_x, own, width, pieces, block)
                continues = (token % row_length != row_length - 1).to(tl.float32)
                seen = grad_x + scaled(after, continues)
                after = seen[:-pieces]
                for tap in tl.static_range(taps):
                    grads = plus_by_row(grads, weights, seen[tap * pieces : (tap + 1) * pieces], 0, tap)
        # ∂L/∂X, ∂L/∂b, ∂L/∂v and ∂L/∂β, through the rewrite
        if rewrites:
            along = sums(dots(grads, k))
            grad_beta = 0.0
            for j in tl.static_range(count):
                grad_beta += written[j] * along[j]
                tl.store(grad_values + token * count + j, beta * along[j], mask=own)
            tl.store(grad_betas + token, grad_beta, mask=own)
            grad_k = plus_inner(zeros(pieces, block), scaled(written, beta), grads)
            across = beta * grad_beta  # kᵀ ∂L/∂k
            if erase:
                erased = scaled(along, -beta)
                grad_k = plus_inner(grad_k, erased, state)
                grads = plus_outer(grads, erased, k)
                target = numbers(values + token * count, own, count)
                for j in tl.static_range(count):
                    across += erased[j] * (target[j] - written[j])
            store(grad_branches + at, columns, scaled(plus(grad_k, k, -across), inverse), own, width, pieces, block)
        store(grad_states + count * at, columns, grads, own, width, pieces, block)
    generators: tl.constexpr = (count + 1) * width + count + 1 if generates else 0
    mixes: tl.constexpr = count * width if count > 1 and taps == 1 else 0
    share = shares + program * (width + generators + mixes)
    store(share, columns, norm_total, True, width, pieces, block)
    share += width
    if generates:
        if from_state:
            store(share, columns, value_totals, True, width, pieces, block)
        else:
            for j in tl.static_range(count):
                total = product(value_totals[j * pieces : (j + 1) * pieces], scale)
                store(share + j * width, columns, total, True, width, pieces, block)
        store(share + count * width, columns, product(gate_total, scale), True, width, pieces, block)
        for j in tl.static_range(1 + count):
            tl.store(share + (count + 1) * width + j, bias_totals[j])
    if mixes > 0:
        store(share + generators, columns, mix_totals, True, width, pieces, block)


@triton.jit
def mix_backward(
    states, branches, betas, inverses, writtens, grad_compressed, shares, tokens, row_length,
    each: tl.constexpr, stages: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    count: tl.constexpr, taps: tl.constexpr, rewrites: tl.constexpr,
):  # fmt: skip
    """Σ_t X⁺_j[t] ⊙ ∂L/∂x[t + s], the gradient of a compressor over tokens. It has too many numbers for the registers of a
    program that walks whole rows; here a program has a block of columns, and nothing to wait for."""
    columns = tl.program_id(1) * block + tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * each
    totals = zeros(taps * count, block)
    after = zeros(taps - 1, block)
    for turn in tl.range(1 - taps, each, num_stages=stages):
        token = first + each - 1 - turn
        exists = token < tokens
        own = exists & (turn >= 0)
        at = token * width
        continues = (token % row_length != row_length - 1).to(tl.float32)
        seen = load(grad_compressed + at, columns, exists, 1, width, 1, block) + scaled(after, continues)
        after = seen[:-1]
        state = load(states + count * at, columns, own, count, width, 1, block)
        if rewrites:
            branch = load(branches + at, columns, own, 1, width, 1, block)
            factor = tl.load(betas + token, mask=own, other=0.0) * tl.load(inverses + token, mask=own, other=0.0)
            state = plus_outer(state, scaled(numbers(writtens + token * count, own, count), factor), branch)
        added = ()
        for tap in tl.static_range(taps):
            added = added + plus_by_row(totals, state, seen[tap : tap + 1], tap, 0)
        totals = added
    share = shares + tl.program_id(0).to(tl.int64) * (taps * count * width)
    store(share, columns, totals, True, width, 1, block)


@triton.jit
def make_again(
    states, branches, betas, inverses, writtens, new_states,
    width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr, count: tl.constexpr,
):  # fmt: skip
    """The states after some writes in a row, from what was kept of the forward pass: no sum to wait for. `branches` and the
    others are tuples, a tensor for each write. (A pass itself reads X⁺ before it is rounded for memory; the next one after.)"""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    at = token * width
    state = load(states + count * at, columns, True, count, width, pieces, block)
    for i in tl.static_range(len(branches)):
        branch = load(branches[i] + at, columns, True, 1, width, pieces, block)
        written = numbers(writtens[i] + token * count, True, count)
        factor = tl.load(betas[i] + token) * tl.load(inverses[i] + token)
        state = rounded(plus_outer(state, scaled(written, factor), branch), states.dtype.element_ty)
        store(new_states[i] + count * at, columns, state, True, width, pieces, block)
