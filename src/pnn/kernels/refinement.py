"""A whole refinement step of PNN, its forward and backward pass written out: matrix products, and the kernels between them.

    [qkv, q] = W h + b,   a = LN(h + drop(W_o attention(qkv) + b_o)),   f = drop(W_2 drop(GELU(W_1 a + b_1)) + b_2)
    δ = f,  LN(f)  or, where it rewrites,  LN(a + f) − h,   h⁺ = h + g ⊙ δ
    g = σ(q ⊙ k / τ + b),  k = W_k δ + b_k,   or, without matrices,  σ(w ⊙ h ⊙ δ + b)

A rewriting step without a gate is a BERT layer: h⁺ = LN(a + f). With rotary positions attention's q and k are turned first.
autograd over the single operations computes the same. Written out, the four or five ways that gradients reach h, and the two
that reach δ, are added inside the products and kernels where they arise, instead of in passes of their own; the gate's query is
projected in one product with attention's; and there is nothing left to compile. With `at` the step is asked for a few tokens
only (the predicted ones, at the last step): attention still needs keys and values of all, everything after it is per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pnn.kernels import attention, diagonal_gate, gate, norm, pointwise, rotary

Rotation = tuple[Tensor, Tensor]


class Weights(NamedTuple):
    """Parameters of a step, in their own precision. `delta_*` (LN on δ), the gate's biases and its opening may be None. A gate
    has `query`, `key` and `temperature`, or `product` (w) and `opening`; a step that rewrites may do without."""

    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    norm: Tensor
    norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    delta: Tensor | None
    delta_bias: Tensor | None
    query: Tensor | None = None
    query_bias: Tensor | None = None
    key: Tensor | None = None
    key_bias: Tensor | None = None
    temperature: Tensor | None = None
    opening: Tensor | None = None
    product: Tensor | None = None

    @property
    def gated(self) -> bool:
        return self.query is not None or self.product is not None


class Settings(NamedTuple):
    heads: int
    longest: int  # an upper bound on the sequences' lengths
    dropout: float
    attention_dropout: float
    eps: float
    rewrites: bool = False


def takes(width: int, heads: int, longest: int) -> bool:
    return attention.takes(width // heads, longest) and width <= min(norm.WIDEST, gate.WIDEST, diagonal_gate.WIDEST)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        at: Tensor | None,
        borders: Tensor,
        seeds: Tensor,
        settings: Settings,
        rotation: Rotation | None,
        *parameters: Tensor | None,
    ) -> Tensor:
        w = Weights(*parameters)  # type: ignore[arg-type]
        width, dtype, p = h.shape[-1], h.dtype, settings.dropout
        attention_seed, norm_seed, gelu_seed, delta_seed = seeds.split(1)
        x = h.reshape(-1, width)
        out, up, down = (matrix.to(dtype) for matrix in (w.out, w.up, w.down))
        projection, projection_bias, query, key = w.qkv, w.qkv_bias, None, None
        if w.query is not None and w.key is not None:
            query, key = w.query.to(dtype), w.key.to(dtype)
            if at is None:  # [qkv, q] in one product where the gate needs q of every token, qkv alone where it needs q of a few
                query_bias = w.qkv_bias.new_zeros(width) if w.query_bias is None else w.query_bias
                projection, projection_bias = torch.cat((w.qkv, w.query)), torch.cat((w.qkv_bias, query_bias))
        projection, projection_bias = projection.to(dtype), projection_bias.to(dtype)

        projected = torch.addmm(projection_bias, x, projection.t())
        if rotation is not None:
            rotary.turn(projected, 2 * settings.heads, width // settings.heads, rotation)
        qkv, q = _parts(projected, width, settings.heads)
        context, log_sums = attention.forward(qkv, borders, settings.longest, settings.attention_dropout, attention_seed)
        context = context.flatten(1)
        here, seen = x, context
        if at is not None:
            here, seen = x.index_select(0, at), context.index_select(0, at)
            q = None if query is None else _times(here, query, w.query_bias)
        attended = torch.mm(seen, out.t())
        a, *statistics = norm.forward(attended, w.out_bias, here, w.norm, w.norm_bias, settings.eps, p, norm_seed, dtype)
        inner = torch.mm(a, up.t())
        active = pointwise.gelu_forward(inner, w.up_bias, p, gelu_seed)
        if w.delta is None or w.delta_bias is None:
            raw = torch.addmm(w.down_bias.to(dtype), active, down.t())
            delta = pointwise.dropped(raw, p, delta_seed)
        else:
            raw = torch.mm(active, down.t())
            residual, subtracted = (a, here if w.gated else None) if settings.rewrites else (None, None)
            delta, *more = norm.forward(
                raw, w.down_bias, residual, w.delta, w.delta_bias, settings.eps, p, delta_seed, dtype, subtracted
            )
            statistics += more
        k = None if key is None else _times(delta, key, w.key_bias)
        ctx.save_for_backward(
            *(at, borders, seeds, x, projected, context, log_sums, here, q, attended, a, inner, active, raw),
            *(delta if w.gated else None, k, projection, query, out, up, down, key, w.out_bias, w.norm, w.up_bias, w.down_bias),
            *(w.temperature, w.opening, w.product, *statistics, *(() if w.delta is None else (w.delta,))),
        )
        ctx.settings, ctx.shape, ctx.rotation = settings, h.shape, rotation
        ctx.has_biases = w.query_bias is not None, w.key_bias is not None
        if q is not None and k is not None:
            assert w.temperature is not None
            after = gate.forward(here, q, k, delta, w.temperature, w.opening)
        elif w.product is not None:
            assert w.opening is not None
            after = diagonal_gate.forward(here, delta, w.product, w.opening)
        else:
            assert settings.rewrites
            after = delta  # the whole proposal
        return after.view(h.shape if at is None else (1, len(at), width))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        at, borders, seeds, x, projected, context, log_sums, here, q, attended, a, inner, active, raw, delta, k, *rest = (
            ctx.saved_tensors
        )
        projection, query, out, up, down, key, out_bias, norm_weight, up_bias, down_bias, temperature, opening, *rest = rest
        product, *statistics = rest
        settings, p, width = ctx.settings, ctx.settings.dropout, x.shape[1]
        attention_seed, norm_seed, gelu_seed, delta_seed = seeds.split(1)
        grad = grad.reshape(here.shape).contiguous()

        grad_projected = torch.empty_like(projected)
        grad_qkv, grad_q = _parts(grad_projected, width, settings.heads)
        found: dict[str, Tensor | None] = {}  # gradients, by the names of the weights
        passing: Tensor | None = grad  # what reaches h beside attention and δ
        if q is not None:
            has_query_bias, has_key_bias = ctx.has_biases
            grad_q = torch.empty_like(q) if grad_q is None else grad_q
            grad_k, grad_delta, numbers = gate.backward(grad, q, k, delta, temperature, opening, grad_q)
            grad_delta = torch.addmm(grad_delta, grad_k, key, out=grad_delta)  # δ is gated, and its key gates
            found |= {"key": _product(grad_k, delta), "key_bias": _sum(grad_k) if has_key_bias else None}
            found |= {"query_bias": _sum(grad_q) if has_query_bias else None}
            found |= {"temperature": numbers[:1], "opening": None if opening is None else numbers[1:]}
        elif product is not None:
            passing, grad_delta, numbers = diagonal_gate.backward(grad, here, delta, product, opening)
            found |= {"product": numbers[0], "opening": numbers[1]}
        else:
            grad_delta, passing = grad, None
        grad_fed: Tensor | None = None  # what reaches a beside the FFN
        if len(statistics) == 2:
            grad_raw = pointwise.dropped(grad_delta, p, delta_seed)
            found["down_bias"] = _sum(grad_raw)
        else:
            *_, means, inverse_deviations, delta_weight = statistics
            residual = a if settings.rewrites else None
            grad_raw, grad_residual, sums = norm.backward(
                grad_delta, raw, down_bias, residual, delta_weight, means, inverse_deviations, p, delta_seed
            )
            found |= {"delta": sums[0], "delta_bias": sums[1], "down_bias": sums[2]}
            if settings.rewrites:
                grad_fed = grad_residual
        grad_inner, found["up_bias"] = pointwise.gelu_backward(inner, up_bias, torch.mm(grad_raw, down), p, gelu_seed)
        # h is changed by the gate, normed with attention, and projected: three ways back, added on the way
        means, inverse_deviations = statistics[:2]
        grad_a = torch.mm(grad_inner, up) if grad_fed is None else torch.addmm(grad_fed, grad_inner, up, out=grad_fed)
        taken = grad_delta if settings.rewrites and passing is not None else None  # δ takes h away
        grad_attended, grad_h, sums = norm.backward(
            grad_a, attended, out_bias, here, norm_weight, means, inverse_deviations, p, norm_seed, passing, taken
        )
        grad_context = torch.mm(grad_attended, out)
        seen = context
        if at is not None:
            seen = context.index_select(0, at)
            grad_context = torch.zeros_like(context).index_add_(0, at, grad_context)
        attention.backward(
            *(qkv_of(projected, width, settings.heads), context, log_sums, grad_context, grad_qkv),
            *(borders, settings.longest, settings.attention_dropout, attention_seed),
        )
        if ctx.rotation is not None:
            rotary.turn(grad_projected, 2 * settings.heads, width // settings.heads, ctx.rotation, back=True)
        grad_projection = _product(grad_projected, x)
        if at is None:
            grad_h = torch.addmm(grad_h, grad_projected, projection, out=grad_h)
            found["query"] = None if grad_q is None else grad_projection[3 * width :]
        else:
            if grad_q is not None:
                grad_h = torch.addmm(grad_h, grad_q, query, out=grad_h)
                found["query"] = _product(grad_q, here)
            grad_h = torch.mm(grad_projected, projection).index_add_(0, at, grad_h)
        found |= {"norm": sums[0], "norm_bias": sums[1], "out": _product(grad_attended, seen), "out_bias": sums[2]}
        found |= {"up": _product(grad_inner, a), "down": _product(grad_raw, active)}
        found |= {"qkv": grad_projection[: 3 * width]}
        found |= {"qkv_bias": _bias_gradient(grad_projected, sums[2], out, settings, ctx.rotation is not None)}
        return grad_h.view(ctx.shape), None, None, None, None, None, *(found.get(name) for name in Weights._fields)


def qkv_of(projected: Tensor, width: int, heads: int) -> Tensor:
    """The first 3 d of each row as (tokens, 3, heads, d / heads): a view."""
    return projected[:, : 3 * width].unflatten(1, (3, heads, width // heads))


def _parts(projected: Tensor, width: int, heads: int) -> tuple[Tensor, Tensor | None]:
    """qkv, and the gate's q (tokens, d) if it was projected with them: views."""
    return qkv_of(projected, width, heads), projected[:, 3 * width :] if projected.shape[1] > 3 * width else None


def _times(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix.t()) if bias is None else torch.addmm(bias.to(x.dtype), x, matrix.t())


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """gradᵀ x in fp32: a matrix's gradient."""
    return torch.mm(grad.t(), x, out_dtype=torch.float32) if x.is_cuda else grad.t().float() @ x.float()


def _bias_gradient(grad_projected: Tensor, grad_out_bias: Tensor, out: Tensor, settings: Settings, turned: bool) -> Tensor:
    """Of b in q, k, v = W h + b: a sum over all tokens, of which only a part has to be read. A vector added to all values comes
    out of attention as it is, because its weights sum to one: it acts as W_o b does in b_o. Added to all keys it moves a
    query's scores alike, which softmax does not see, unless each key is turned by its place."""
    width = len(out)
    if settings.attention_dropout > 0:  # weights no longer sum to one
        return _sum(grad_projected[:, : 3 * width])
    of_values = grad_out_bias @ out.float()
    if turned:
        return torch.cat((_sum(grad_projected[:, : 2 * width]), of_values))
    return torch.cat((_sum(grad_projected[:, :width]), torch.zeros_like(of_values), of_values))


def _sum(grad: Tensor) -> Tensor:
    return grad.sum(0, dtype=torch.float32)


@torch.compiler.disable  # nothing to gain from it, and it would have to follow all of the above
def step(
    h: Tensor, at: Tensor | None, borders: Tensor, weights: Weights, settings: Settings, rotation: Rotation | None = None
) -> Tensor:
    """h: (1, tokens, d), packed, in the precision to compute in → the next state; with `at` of these, (1, len(at), d).
    `rotation`: cos and sin of rotary positions."""
    seeds = torch.randint(0, 2**31 - 1, (4,), device=h.device)
    out: Tensor = _Step.apply(h, at, borders, seeds, settings, rotation, *weights)
    return out
