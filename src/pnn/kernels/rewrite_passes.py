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
backward, the gradients of the next tokens' x are. A program therefore starts a few tokens outside its own ones.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


# A row of `width` numbers is a tuple of `pieces` vectors of `block`: 768 is three times 256, where one vector, whose length has
# to be a power of two, would compute a quarter in vain. Several rows are one tuple, row after row.


@triton.jit
def _load(base, columns, exists, rows: tl.constexpr, width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
    found = ()
    for j in tl.static_range(rows):
        for p in tl.static_range(pieces):
            if pieces * block == width:
                mask = exists
            else:
                mask = exists & (p * block + columns < width)
            found = found + (tl.load(base + (j * width + p * block) + columns, mask=mask, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _store(base, columns, rows, exists, width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
    for j in tl.static_range(len(rows) // pieces):
        for p in tl.static_range(pieces):
            if pieces * block == width:
                mask = exists
            else:
                mask = exists & (p * block + columns < width)
            vector = rows[j * pieces + p].to(base.dtype.element_ty)
            tl.store(base + (j * width + p * block) + columns, vector, mask=mask)


@triton.jit
def _zeros(count: tl.constexpr, block: tl.constexpr):
    found = ()
    for _ in tl.static_range(count):
        found = found + (tl.zeros([block], tl.float32),)
    return found


@triton.jit
def _numbers(base, exists, count: tl.constexpr):
    found = ()
    for j in tl.static_range(count):
        found = found + (tl.load(base + j, mask=exists, other=0.0),)
    return found


@triton.jit
def _scaled(vectors, factor):
    found = ()
    for i in tl.static_range(len(vectors)):
        found = found + (vectors[i] * factor,)
    return found


@triton.jit
def _product(some, others):
    found = ()
    for i in tl.static_range(len(some)):
        found = found + (some[i] * others[i],)
    return found


@triton.jit
def _plus(some, others, factor):
    """some + factor · others."""
    found = ()
    for i in tl.static_range(len(some)):
        found = found + (some[i] + factor * others[i],)
    return found


@triton.jit
def _plus_outer(rows, factors, row):
    """rows_j + factor_j · row."""
    pieces: tl.constexpr = len(row)
    found = ()
    for j in tl.static_range(len(rows) // pieces):
        for p in tl.static_range(pieces):
            found = found + (rows[j * pieces + p] + factors[j] * row[p],)
    return found


@triton.jit
def _plus_by_row(some, others, row, some_from: tl.constexpr, others_from: tl.constexpr):
    """some_j + others_j ⊙ row, for one tap's rows of those that have several taps."""
    pieces: tl.constexpr = len(row)
    size: tl.constexpr = min(len(some), len(others))
    found = ()
    for i in tl.static_range(size):
        found = found + (some[some_from * size + i] + others[others_from * size + i] * row[i % pieces],)
    return found


@triton.jit
def _plus_inner(row, factors, rows):
    """row + Σ_j factor_j · rows_j."""
    pieces: tl.constexpr = len(row)
    found = ()
    for p in tl.static_range(pieces):
        total = row[p]
        for j in tl.static_range(len(rows) // pieces):
            total += factors[j] * rows[j * pieces + p]
        found = found + (total,)
    return found


@triton.jit
def _mixed(weights, rows, tap: tl.constexpr, pieces: tl.constexpr):
    """The row Σ_j w_j ⊙ X_j, with the weights of one tap."""
    found = ()
    for p in tl.static_range(pieces):
        total = weights[tap * len(rows) + p] * rows[p]
        for j in tl.static_range(1, len(rows) // pieces):
            total += weights[tap * len(rows) + j * pieces + p] * rows[j * pieces + p]
        found = found + (total,)
    return found


@triton.jit
def _dots(rows, row):
    """For each of the rows its product with this one, added up over the pieces: what is left is to sum a vector."""
    pieces: tl.constexpr = len(row)
    found = ()
    for j in tl.static_range(len(rows) // pieces):
        total = rows[j * pieces] * row[0]
        for p in tl.static_range(1, pieces):
            total += rows[j * pieces + p] * row[p]
        found = found + (total,)
    return found


@triton.jit
def _plus2(a, b, y, z):
    return a + y, b + z


@triton.jit
def _plus3(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _plus4(a, b, c, d, w, x, y, z):
    return a + w, b + x, c + y, d + z


@triton.jit
def _plus5(a, b, c, d, e, v, w, x, y, z):
    return a + v, b + w, c + x, d + y, e + z


@triton.jit
def _plus6(a, b, c, d, e, f, u, v, w, x, y, z):
    return a + u, b + v, c + w, d + x, e + y, f + z


@triton.jit
def _sums(vectors):
    """The sums of all of them in one round: threads wait for each other once, not once a sum."""
    count: tl.constexpr = len(vectors)
    if count == 1:
        sums = (tl.sum(vectors[0], 0),)
    elif count == 2:
        sums = tl.reduce(vectors, 0, _plus2)
    elif count == 3:
        sums = tl.reduce(vectors, 0, _plus3)
    elif count == 4:
        sums = tl.reduce(vectors, 0, _plus4)
    elif count == 5:
        sums = tl.reduce(vectors, 0, _plus5)
    else:
        sums = tl.reduce(vectors, 0, _plus6)
    return sums


@triton.jit
def _rounded(vectors, dtype: tl.constexpr):
    found = ()
    for i in tl.static_range(len(vectors)):
        found = found + (vectors[i].to(dtype).to(tl.float32),)
    return found


# The passes -----------------------------------------------------------------------------------------------------------------


@triton.jit
def forward(
    states, branches, values, betas, mix, norm, value_weight, value_bias, gate_weight, gate_bias,
    new_states, compressed, contexts, new_values, new_betas, inverses, writtens, norm_inverses,
    tokens, row_length, eps, each: tl.constexpr, stages: tl.constexpr,
    width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr, count: tl.constexpr, taps: tl.constexpr,
    rewrites: tl.constexpr, erase: tl.constexpr, generates: tl.constexpr, from_state: tl.constexpr,
):  # fmt: skip
    """`stages`: tokens in flight; the next ones are fetched while one is computed."""
    columns = tl.arange(0, block)
    first = tl.program_id(0).to(tl.int64) * each
    if taps > 1:
        carried = _zeros((taps - 1) * pieces, block)  # to x of the next tokens
    scale = _load(norm, columns, True, 1, width, pieces, block)
    if count > 1:
        weights = _load(mix, columns, True, taps * count, width, pieces, block)
    if generates:
        to_gate = _load(gate_weight, columns, True, 1, width, pieces, block)
        to_values = _load(value_weight, columns, True, count, width, pieces, block)
    for turn in tl.range(1 - taps, each, num_stages=stages):
        token = first + turn
        exists = (token >= 0) & (token < tokens)
        own = exists & (turn >= 0)
        at = token * width
        state = _load(states + count * at, columns, exists, count, width, pieces, block)
        if rewrites:
            branch = _load(branches + at, columns, exists, 1, width, pieces, block)
            beta = tl.load(betas + token, mask=exists, other=0.0)
            written = _numbers(values + token * count, exists, count)
            if erase:
                sums = _sums(_dots(branch, branch) + _dots(state, branch))
            else:
                sums = _sums(_dots(branch, branch))
            inverse = 1 / tl.sqrt(sums[0] + 1e-10)  # ε² of a direction's length
            if erase:
                written = _plus(written, sums[1:], -inverse)
            state = _plus_outer(state, _scaled(written, beta * inverse), branch)
            _store(new_states + count * at, columns, state, own, width, pieces, block)
            tl.store(inverses + token, inverse, mask=own)
            for j in tl.static_range(count):
                tl.store(writtens + token * count + j, written[j], mask=own)
        if count > 1:
            x = _mixed(weights, state, 0, pieces)
        else:
            x = state
        if taps > 1:
            continues = (token % row_length != 0).to(tl.float32)
            x = _plus(x, carried[:pieces], continues)
            further = ()
            for tap in tl.static_range(1, taps - 1):
                part = _mixed(weights, state, tap, pieces)
                further = further + _plus(part, carried[tap * pieces : (tap + 1) * pieces], continues)
            carried = further + _mixed(weights, state, taps - 1, pieces)
            _store(compressed + at, columns, x, own, width, pieces, block)
        c = _product(x, scale)
        if generates:
            if from_state:
                sums = _sums(_dots(x, x) + _dots(to_gate, c) + _dots(to_values, x))
            else:
                sums = _sums(_dots(x, x) + _dots(to_gate, c) + _dots(to_values, c))
        else:
            sums = _sums(_dots(x, x))
        norm_inverse = 1 / tl.sqrt(sums[0] / width + eps)
        tl.store(norm_inverses + token, norm_inverse, mask=own)
        _store(contexts + at, columns, _scaled(c, norm_inverse), own, width, pieces, block)
        if generates:
            tl.store(new_betas + token, 2 * _sigmoid(sums[1] * norm_inverse + tl.load(gate_bias)), mask=own)
            for j in tl.static_range(count):
                if from_state:
                    value = 4 * _sigmoid(sums[2 + j] + tl.load(value_bias + j))
                else:
                    value = sums[2 + j] * norm_inverse
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
    norm_total = _zeros(pieces, block)
    gate_total = _zeros(pieces, block)
    value_totals = _zeros(count * pieces, block)
    if taps == 1:
        mix_totals = _zeros(count * pieces, block)
    else:
        after = _zeros((taps - 1) * pieces, block)  # ∂L/∂x of the next tokens of the row
    bias_totals = (0.0,)
    for _ in tl.static_range(count):
        bias_totals = bias_totals + (0.0,)
    scale = _load(norm, columns, True, 1, width, pieces, block)
    if count > 1:
        weights = _load(mix, columns, True, taps * count, width, pieces, block)
    if generates:
        to_gate = _load(gate_weight, columns, True, 1, width, pieces, block)
        to_values = _load(value_weight, columns, True, count, width, pieces, block)
    for turn in tl.range(1 - taps, each, num_stages=stages):
        token = first + each - 1 - turn
        exists = token < tokens
        own = exists & (turn >= 0)
        mine = own.to(tl.float32)
        at = token * width
        state = _load(states + count * at, columns, own, count, width, pieces, block)
        if has_grad:
            grads = _load(grad_new_states + count * at, columns, own, count, width, pieces, block)
        else:
            grads = _zeros(count * pieces, block)
        new_state = state
        if rewrites:
            beta = tl.load(betas + token, mask=own, other=0.0)
            inverse = tl.load(inverses + token, mask=own, other=0.0)
            written = _numbers(writtens + token * count, own, count)
            k = _scaled(_load(branches + at, columns, own, 1, width, pieces, block), inverse)
            new_state = _plus_outer(state, _scaled(written, beta), k)
        if taps > 1:
            x = _load(compressed + at, columns, exists, 1, width, pieces, block)
        elif count > 1:
            x = _mixed(weights, new_state, 0, pieces)
        else:
            x = new_state
        # ∂L/∂x, through the norm and the generators
        norm_inverse = tl.load(norm_inverses + token, mask=exists, other=0.0)
        unit = _scaled(x, norm_inverse)
        grad = _load(grad_contexts + at, columns, exists, 1, width, pieces, block)
        if generates:
            next_beta = tl.load(new_betas + token, mask=exists, other=0.0)
            gate_gradient = tl.load(grad_new_betas + token, mask=exists, other=0.0) * next_beta * (1 - next_beta / 2)
            value_gradients = _numbers(grad_new_values + token * count, exists, count)
            if from_state:
                next_values = _numbers(new_values + token * count, exists, count)
                through = ()
                for j in tl.static_range(count):
                    through = through + (value_gradients[j] * next_values[j] * (1 - next_values[j] / 4),)
                value_gradients = through
            grad = _plus(grad, to_gate, gate_gradient)
            if not from_state:
                grad = _plus_inner(grad, value_gradients, to_values)
        scaled = _product(grad, scale)
        dot = _sums(_dots(scaled, unit))[0]
        grad_x = _plus(_scaled(scaled, norm_inverse), unit, -norm_inverse * dot / width)
        norm_total = _plus(norm_total, _product(grad, unit), mine)
        if generates:
            gate_total = _plus(gate_total, unit, mine * gate_gradient)  # times the norm's scale at the end
            bias_totals = _plus(bias_totals, (gate_gradient,) + value_gradients, mine)
            if from_state:
                value_totals = _plus_outer(value_totals, _scaled(value_gradients, mine), x)
                grad_x = _plus_inner(grad_x, value_gradients, to_values)
            else:
                value_totals = _plus_outer(value_totals, _scaled(value_gradients, mine), unit)
        # ∂L/∂X⁺, through the compressor
        if count == 1:
            grads = _plus(grads, grad_x, 1.0)
        else:
            if taps == 1:
                mix_totals = _plus_by_row(mix_totals, new_state, grad_x, 0, 0)
                grads = _plus_by_row(grads, weights, grad_x, 0, 0)
            else:
                _store(grad_compressed + at, columns, grad_x, own, width, pieces, block)
                continues = (token % row_length != row_length - 1).to(tl.float32)
                seen = grad_x + _scaled(after, continues)
                after = seen[:-pieces]
                for tap in tl.static_range(taps):
                    grads = _plus_by_row(grads, weights, seen[tap * pieces : (tap + 1) * pieces], 0, tap)
        # ∂L/∂X, ∂L/∂b, ∂L/∂v and ∂L/∂β, through the rewrite
        if rewrites:
            along = _sums(_dots(grads, k))
            grad_beta = 0.0
            for j in tl.static_range(count):
                grad_beta += written[j] * along[j]
                tl.store(grad_values + token * count + j, beta * along[j], mask=own)
            tl.store(grad_betas + token, grad_beta, mask=own)
            grad_k = _plus_inner(_zeros(pieces, block), _scaled(written, beta), grads)
            across = beta * grad_beta  # kᵀ ∂L/∂k
            if erase:
                erased = _scaled(along, -beta)
                grad_k = _plus_inner(grad_k, erased, state)
                grads = _plus_outer(grads, erased, k)
                target = _numbers(values + token * count, own, count)
                for j in tl.static_range(count):
                    across += erased[j] * (target[j] - written[j])
            _store(grad_branches + at, columns, _scaled(_plus(grad_k, k, -across), inverse), own, width, pieces, block)
        _store(grad_states + count * at, columns, grads, own, width, pieces, block)
    generators: tl.constexpr = (count + 1) * width + count + 1 if generates else 0
    mixes: tl.constexpr = count * width if count > 1 and taps == 1 else 0
    share = shares + program * (width + generators + mixes)
    _store(share, columns, norm_total, True, width, pieces, block)
    share += width
    if generates:
        if from_state:
            _store(share, columns, value_totals, True, width, pieces, block)
        else:
            for j in tl.static_range(count):
                total = _product(value_totals[j * pieces : (j + 1) * pieces], scale)
                _store(share + j * width, columns, total, True, width, pieces, block)
        _store(share + count * width, columns, _product(gate_total, scale), True, width, pieces, block)
        for j in tl.static_range(1 + count):
            tl.store(share + (count + 1) * width + j, bias_totals[j])
    if mixes > 0:
        _store(share + generators, columns, mix_totals, True, width, pieces, block)


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
    totals = _zeros(taps * count, block)
    after = _zeros(taps - 1, block)
    for turn in tl.range(1 - taps, each, num_stages=stages):
        token = first + each - 1 - turn
        exists = token < tokens
        own = exists & (turn >= 0)
        at = token * width
        continues = (token % row_length != row_length - 1).to(tl.float32)
        seen = _load(grad_compressed + at, columns, exists, 1, width, 1, block) + _scaled(after, continues)
        after = seen[:-1]
        state = _load(states + count * at, columns, own, count, width, 1, block)
        if rewrites:
            branch = _load(branches + at, columns, own, 1, width, 1, block)
            factor = tl.load(betas + token, mask=own, other=0.0) * tl.load(inverses + token, mask=own, other=0.0)
            state = _plus_outer(state, _scaled(_numbers(writtens + token * count, own, count), factor), branch)
        added = ()
        for tap in tl.static_range(taps):
            added = added + _plus_by_row(totals, state, seen[tap : tap + 1], tap, 0)
        totals = added
    share = shares + tl.program_id(0).to(tl.int64) * (taps * count * width)
    _store(share, columns, totals, True, width, 1, block)


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
    state = _load(states + count * at, columns, True, count, width, pieces, block)
    for i in tl.static_range(len(branches)):
        branch = _load(branches[i] + at, columns, True, 1, width, pieces, block)
        written = _numbers(writtens[i] + token * count, True, count)
        factor = tl.load(betas[i] + token) * tl.load(inverses[i] + token)
        state = _rounded(_plus_outer(state, _scaled(written, factor), branch), states.dtype.element_ty)
        _store(new_states[i] + count * at, columns, state, True, width, pieces, block)
