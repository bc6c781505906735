"""Rows of numbers as tuples of vectors, for kernels that hold several rows in registers.

A row of `width` numbers is a tuple of `pieces` vectors of `block`: 768 is three times 256, where one vector, whose length has
to be a power of two, would compute a quarter in vain. Several rows are one tuple, row after row. Every vector has the same
layout, so that no product of two of them goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(base, columns, exists, rows: tl.constexpr, width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
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
def store(base, columns, rows, exists, width: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
    for j in tl.static_range(len(rows) // pieces):
        for p in tl.static_range(pieces):
            if pieces * block == width:
                mask = exists
            else:
                mask = exists & (p * block + columns < width)
            vector = rows[j * pieces + p].to(base.dtype.element_ty)
            tl.store(base + (j * width + p * block) + columns, vector, mask=mask)


@triton.jit
def zeros(count: tl.constexpr, block: tl.constexpr):
    found = ()
    for _ in tl.static_range(count):
        found = found + (tl.zeros([block], tl.float32),)
    return found


@triton.jit
def numbers(base, exists, count: tl.constexpr):
    found = ()
    for j in tl.static_range(count):
        found = found + (tl.load(base + j, mask=exists, other=0.0),)
    return found


@triton.jit
def scaled(vectors, factor):
    found = ()
    for i in tl.static_range(len(vectors)):
        found = found + (vectors[i] * factor,)
    return found


@triton.jit
def product(some, others):
    found = ()
    for i in tl.static_range(len(some)):
        found = found + (some[i] * others[i],)
    return found


@triton.jit
def plus(some, others, factor):
    """some + factor · others."""
    found = ()
    for i in tl.static_range(len(some)):
        found = found + (some[i] + factor * others[i],)
    return found


@triton.jit
def plus_outer(rows, factors, row):
    """rows_j + factor_j · row."""
    pieces: tl.constexpr = len(row)
    found = ()
    for j in tl.static_range(len(rows) // pieces):
        for p in tl.static_range(pieces):
            found = found + (rows[j * pieces + p] + factors[j] * row[p],)
    return found


@triton.jit
def plus_by_row(some, others, row, some_from: tl.constexpr, others_from: tl.constexpr):
    """some_j + others_j ⊙ row, for one tap's rows of those that have several taps."""
    pieces: tl.constexpr = len(row)
    size: tl.constexpr = min(len(some), len(others))
    found = ()
    for i in tl.static_range(size):
        found = found + (some[some_from * size + i] + others[others_from * size + i] * row[i % pieces],)
    return found


@triton.jit
def plus_inner(row, factors, rows):
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
def mixed(weights, rows, tap: tl.constexpr, pieces: tl.constexpr):
    """The row Σ_j w_j ⊙ X_j, with the weights of one tap."""
    found = ()
    for p in tl.static_range(pieces):
        total = weights[tap * len(rows) + p] * rows[p]
        for j in tl.static_range(1, len(rows) // pieces):
            total += weights[tap * len(rows) + j * pieces + p] * rows[j * pieces + p]
        found = found + (total,)
    return found


@triton.jit
def dots(rows, row):
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
def sums(vectors):
    """The sums of all of them in one round: threads wait for each other once, not once a sum."""
    count: tl.constexpr = len(vectors)
    if count == 1:
        total = (tl.sum(vectors[0], 0),)
    elif count == 2:
        total = tl.reduce(vectors, 0, _plus2)
    elif count == 3:
        total = tl.reduce(vectors, 0, _plus3)
    elif count == 4:
        total = tl.reduce(vectors, 0, _plus4)
    elif count == 5:
        total = tl.reduce(vectors, 0, _plus5)
    else:
        total = tl.reduce(vectors, 0, _plus6)
    return total


@triton.jit
def rounded(vectors, dtype: tl.constexpr):
    found = ()
    for i in tl.static_range(len(vectors)):
        found = found + (vectors[i].to(dtype).to(tl.float32),)
    return found
