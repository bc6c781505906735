"""The one room that chooses between plain and fast forms.

Everywhere else in `nn/` stands the equation, in plain torch. Here is what computes the same faster, and when it may:

* kernels, on a GPU in 16 bit: the steps between matrix products (dropout, GELU, norm, gate) are one pass over memory, because
  there they, not the products, would take most of the time. Each block asks once (`for_kernels`).
* a whole refinement step written out, forward and backward (`kernels/refinement`), in training.
* attention over packed sequences, in one of four forms (`attention`).
* logits over a vocabulary of an awkward size (`read_out`).
* what a step of halting tokens does between its products, on a GPU in 16 bit (`kernels/live`).

A module that somebody listens to or has replaced (a hook, an adapter) is called, never bypassed: `plain` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn import kernels
from pnn.kernels import short_rows
from pnn.nn.causal import Attend, causal_attention
from pnn.nn.feed_forward import FeedForward
from pnn.nn.gating import DiagonalGate, QueryKeyGate
from pnn.nn.head import VocabularyHead
from pnn.nn.packing import Layout, only_at, packed_attention, padded_attention, round_up, rows_of
from pnn.nn.rotary import rotate

MANY_ROWS = 256  # whose logits are worth a copy of the vocabulary's matrix

# When -----------------------------------------------------------------------------------------------------------------


def products_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The precision of products with numbers of this kind."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def computed_in(x: Tensor) -> torch.dtype:
    return products_in(x.device, x.dtype)


def kernels_compute(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels take over there: in 16 bit, on a GPU that Triton knows well (the Ampere generation or later)."""
    if device.type != "cuda" or not kernels.HAS_TRITON or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def for_kernels(x: Tensor) -> bool:
    return kernels_compute(x.device, computed_in(x))


def untouched(module: nn.Module) -> bool:
    """Whether a kernel may compute in this module's stead: nobody listens to it, changes what it returns or quantised it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):  # accelerate replaces it where weights are elsewhere
        return False
    # torchao puts tensors of its own in their place, which take part in products and in nothing else
    return all(type(one) in (nn.Parameter, Tensor, type(None)) for one in module._parameters.values())


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module) is kind and untouched(module)


def plain_attention(module: Any) -> bool:
    """`plain(module, SelfAttention)`, which this file cannot import."""
    return getattr(module, "is_plain", False) and untouched(module)


def written_out(block: Any, h: Tensor, layout: Layout) -> bool:
    """Whether a step or layer is computed by kernels/refinement: in training, in 16 bit on a GPU, with nothing hooked or
    replaced."""
    if layout.cu_seqlens is None or layout.watched is not None or not torch.is_grad_enabled():
        return False
    if layout.context is not None:  # half of the step is done
        return False
    if not (for_kernels(h) and h.dtype == computed_in(h) and can_write_out(block)):
        return False
    from pnn.kernels import refinement

    return refinement.takes(h.shape[-1], block.attention.num_heads, layout.max_seqlen)


def can_write_out(block: Any) -> bool:
    """Whether a refiner or a layer is made of what kernels/refinement knows."""
    attention = block.attention
    if getattr(block, "own_form", block) is None or not plain_attention(attention):  # a rule of somebody's own
        return False
    parts = (type(block), type(attention), FeedForward, QueryKeyGate, DiagonalGate, nn.Linear, nn.LayerNorm, nn.Dropout)
    inside = (*block.modules(), *attention.modules())  # which may be another refiner's
    if not all(type(module) in parts and untouched(module) for module in inside):
        return False
    # where heads were taken away or added there are other shapes
    return attention.num_heads * attention.head_width == attention.qkv.in_features


def nothing_to_compile(blocks: list[Any], longest: int) -> bool:
    """Whether all of them train written out, in sequences of at most so many tokens."""
    if not (kernels.HAS_TRITON and all(can_write_out(block) for block in blocks)):
        return False
    from pnn.kernels import refinement

    return all(refinement.takes(block.attention.qkv.in_features, block.attention.num_heads, longest) for block in blocks)


# Blocks ---------------------------------------------------------------------------------------------------------------


def layer(block: Any, h: Tensor, layout: Layout, at: Tensor | None) -> Tensor:
    """A `TransformerLayer`: a rewriting step without a gate."""
    if written_out(block, h, layout):
        return refinement_step(block, block.ffn_norm, None, h, layout, at, rewrites=True)
    a = attended(block, h, layout, at)
    return add_norm(*fed(block.ffn, a), block.dropout, a, block.ffn_norm)


def embed(embeddings: Any, tokens: Tensor, places: Tensor | None) -> Tensor:
    from pnn.kernels import pointwise

    normed = add_norm(tokens, None, None, places, embeddings.norm)
    return pointwise.dropout(normed, probability(embeddings.dropout))


def gated_step(refiner: Any, h: Tensor, layout: Layout, at: Tensor | None) -> Tensor:
    """h⁺ = h + g ⊙ δ, δ = FFN(a)."""
    if written_out(refiner, h, layout):
        return refinement_step(refiner, refiner.delta_norm, refiner.gate, h, layout, at, rewrites=False)
    a = attended(refiner, h, layout, at)
    if refiner.delta_norm is not None:
        delta = add_norm(*fed(refiner.ffn, a), refiner.dropout, None, refiner.delta_norm)
    elif for_kernels(h):
        from pnn.kernels import pointwise

        delta = pointwise.dropout(refiner.ffn(a), probability(refiner.dropout))
    else:
        delta = refiner.dropout(refiner.ffn(a))
    return gated_update(refiner.gate, only_at(h, at), delta)


def rewriting_step(refiner: Any, h: Tensor, layout: Layout, at: Tensor | None) -> Tensor:
    """h⁺ = h + g ⊙ (c − h), c = LayerNorm(a + FFN(a)). Without a gate h⁺ = c."""
    if written_out(refiner, h, layout):
        return refinement_step(refiner, refiner.delta_norm, refiner.gate, h, layout, at, rewrites=True)
    a = attended(refiner, h, layout, at)
    assert refiner.delta_norm is not None
    proposal = add_norm(*fed(refiner.ffn, a), refiner.dropout, a, refiner.delta_norm)
    if refiner.gate is None:
        return proposal
    here = only_at(h, at)
    return gated_update(refiner.gate, here, proposal - here)


def refinement_step(
    block: Any, norm: nn.LayerNorm | None, gate: nn.Module | None, h: Tensor, layout: Layout, at: Tensor | None, rewrites: bool
) -> Tensor:
    """Forward and backward pass of a whole step, written out."""
    from pnn.kernels import refinement

    attention, ffn = block.attention, block.ffn
    assert layout.cu_seqlens is not None
    weights = refinement.Weights(
        qkv=attention.qkv.weight,
        qkv_bias=attention.qkv.bias,
        out=attention.out.weight,
        out_bias=attention.out.bias,
        norm=block.attention_norm.weight,
        norm_bias=block.attention_norm.bias,
        up=ffn.up.weight,
        up_bias=ffn.up.bias,
        down=ffn.down.weight,
        down_bias=ffn.down.bias,
        delta=None if norm is None else norm.weight,
        delta_bias=None if norm is None else norm.bias,
        **gate_weights(gate),
    )
    settings = refinement.Settings(
        attention.num_heads,
        layout.max_seqlen,
        probability(block.dropout),
        attention.attention_dropout if block.training else 0.0,
        block.attention_norm.eps,
        rewrites,
    )
    return refinement.step(h, at, layout.cu_seqlens, weights, settings, layout.rotation)


def gate_weights(gate: nn.Module | None) -> dict[str, Tensor | None]:
    if isinstance(gate, DiagonalGate):
        return {"product": gate.product, "opening": gate.opening}
    if isinstance(gate, QueryKeyGate):
        linear = {"query": gate.query.weight, "query_bias": gate.query.bias, "key": gate.key.weight, "key_bias": gate.key.bias}
        return linear | {"temperature": gate.temperature, "opening": gate.opening}
    return {}


# Their pieces ---------------------------------------------------------------------------------------------------------


def attended(block: Any, h: Tensor, layout: Layout, at: Tensor | None) -> Tensor:
    """a = LayerNorm(h + dropout(Attn(h)))."""
    attention = block.attention
    if for_kernels(h) and plain_attention(attention) and plain(attention.out, nn.Linear):
        x, bias = F.linear(only_at(attention.context(h, layout), at), attention.out.weight), attention.out.bias
    else:
        x, bias = attention(h, layout, at), None
    return add_norm(x, bias, block.dropout, only_at(h, at), block.attention_norm)


def fed(ffn: nn.Module, a: Tensor) -> tuple[Tensor, Tensor | None]:
    """FFN(a) without b_2, and b_2, where the next kernel adds it; elsewhere (FFN(a), None)."""
    if not (for_kernels(a) and plain(ffn, FeedForward)):
        return ffn(a), None
    from pnn.kernels import pointwise

    assert isinstance(ffn, FeedForward)
    if plain(ffn.up, nn.Linear):
        inner = pointwise.gelu_dropout(F.linear(a, ffn.up.weight), ffn.up.bias, probability(ffn.dropout))
    else:
        inner = ffn.dropout(F.gelu(ffn.up(a)))
    return (F.linear(inner, ffn.down.weight), ffn.down.bias) if plain(ffn.down, nn.Linear) else (ffn.down(inner), None)


def add_norm(x: Tensor, bias: Tensor | None, dropout: nn.Dropout | None, residual: Tensor | None, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm(residual + dropout(x + bias)). A kernel leaves it in 16 bit: the sum and the statistics inside are in fp32,
    and what follows is a product in 16 bit or, for a stream of states, as good (see docs/decisions.md)."""
    if for_kernels(x) and plain(norm, nn.LayerNorm):
        from pnn.kernels import norm as kernel

        if kernel.takes(x):
            p = 0.0 if dropout is None else probability(dropout)
            if residual is not None and residual.shape != x.shape:  # rows that share their positions: a kernel reads by the row
                residual = residual.expand_as(x)
            return kernel.dropout_add_norm(x, bias, residual, norm.weight, norm.bias, norm.eps, p, computed_in(x))
    x = x if bias is None else x + bias
    x = x if dropout is None else dropout(x)
    return norm(x if residual is None else residual + x)


def gated_update(gate: nn.Module | None, h: Tensor, delta: Tensor) -> Tensor:
    """h + g ⊙ δ, for callers that do not need the gate itself."""
    assert gate is not None
    if plain(gate, DiagonalGate) and for_kernels(h):
        assert isinstance(gate, DiagonalGate)
        from pnn.kernels import diagonal_gate

        if diagonal_gate.takes(h):
            return diagonal_gate.gated_update(h, delta, gate.product, gate.opening)
    if plain(gate, QueryKeyGate):
        assert isinstance(gate, QueryKeyGate)
        if for_kernels(h):
            from pnn.kernels import gate as kernel

            if kernel.takes(h):
                return kernel.gated_update(h, gate.query(h), gate.key(delta), delta, gate.temperature, gate.opening)
        elif plain(gate.query, nn.Linear) and torch.is_grad_enabled():
            # τ divides the matrix instead of every token, which takes its gradient over the tokens three times less
            bias = None if gate.query.bias is None else gate.query.bias / gate.temperature
            logits = F.linear(h, gate.query.weight / gate.temperature, bias) * gate.key(delta)
            return torch.addcmul(h, torch.sigmoid(logits if gate.opening is None else logits + gate.opening), delta)
    return torch.addcmul(h, gate(h, delta), delta)


def recalled(h: Tensor, origin: Tensor, share: Tensor) -> Tensor:
    """h + r ⊙ (h⁰ − h)."""
    if for_kernels(h):
        from pnn.kernels import recall

        if recall.takes(h, origin):
            return recall.recall(h, origin, share)
    return torch.lerp(h, origin.to(h.dtype), share.to(h.dtype))


def probability(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def read_out(head: nn.Module, h: Tensor) -> Tensor:
    """What a head says of these states, for callers that need no gradients and do not mind where rows of logits lie.

    Rows of 30,522 numbers do not begin where matrix units like to write, and take three times as long. So the states of many
    tokens are multiplied by a copy of the vocabulary's matrix with a few rows more, whose logits are cut off."""
    decoder, x = _decoder_of(head, h)
    return padded_logits(decoder, x)[..., : len(decoder.weight)] if _pads(decoder, x) else decoder(x)


def average_row(head: nn.Module, h: Tensor, table: Tensor) -> Tensor:
    """Σ_v p_v E_v, p = softmax(head(h)): the rows of a table as likely as a head thinks, without gradients. Where logits are
    padded they stay so, for the second product reads them too."""
    decoder, x = _decoder_of(head, h)
    if _pads(decoder, x):
        logits = padded_logits(decoder, x, filler=-torch.inf)
        table = padded(table, logits.dtype)
    else:
        logits = decoder(x)
    with torch.autocast(x.device.type, enabled=False):  # which would make probabilities in fp32: the sums inside are
        return (logits.softmax(-1) @ table.to(logits.dtype)).to(h.dtype)


def _decoder_of(head: nn.Module, h: Tensor) -> tuple[Any, Tensor]:
    """The vocabulary's matrix and what it is applied to; or a head that somebody replaced, which is called as it is."""
    if not plain(head, VocabularyHead):
        return head, h
    assert isinstance(head, VocabularyHead)
    return head.decoder, head.features(h)


def _pads(decoder: Any, x: Tensor) -> bool:
    awkward = for_kernels(x) and plain(decoder, nn.Linear) and len(decoder.weight) % 8 and not torch.is_grad_enabled()
    return bool(awkward and x.numel() >= MANY_ROWS * x.shape[-1])  # asked last: while ONNX is written nobody knows


def padded_logits(decoder: nn.Linear, x: Tensor, filler: float = 0.0) -> Tensor:
    dtype = computed_in(x)
    bias = decoder.weight.new_zeros(len(decoder.weight)) if decoder.bias is None else decoder.bias
    return F.linear(x.to(dtype), padded(decoder.weight, dtype), padded(bias, dtype, filler))


def padded(rows: Tensor, dtype: torch.dtype, filler: float = 0.0) -> Tensor:
    """A copy with so many rows more that products with it are as fast as they can be."""
    out = rows.new_empty(round_up(len(rows), 128), *rows.shape[1:], dtype=dtype)
    out[: len(rows)].copy_(rows)
    out[len(rows) :].fill_(filler)
    return out


# Attention ------------------------------------------------------------------------------------------------------------


def attention(qkv: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """softmax(q_i k_iᵀ / √d_head) v_i of every head: (…, 3, heads, d_head) → (…, heads, d_head), by the fastest form that
    computes it."""
    if qkv.shape[-2] == 0:
        if layout.past is not None:
            layout.past.count(qkv)
        return qkv.select(-3, 0)  # no heads: W_o of nothing is its bias
    if layout.past is not None:
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(-3))
        return causal_attention(
            q, k, v, layout.past, dropout, layout.watched, attend_by(q, q.shape[0] * q.shape[1], q.shape[2])
        ).transpose(1, 2)
    if layout.cu_seqlens is None:
        q, k, v = qkv.unbind(-3)
        return padded_attention(q, k, v, layout.keep, dropout, attend_by(q, q.shape[0] * q.shape[2], q.shape[1]))
    return packed(qkv.flatten(0, -4), layout, dropout).view(*qkv.shape[:-3], *qkv.shape[-2:])


def packed(qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
    """(tokens, 3, heads, d_head) → (tokens, heads, d_head). On a GPU in 16 bit our own kernel takes short sequences, torch's
    variable-length flash attention, which has no dropout, longer ones; on a CPU batched products take short ones."""
    if for_kernels(qkv):
        from pnn.kernels import attention as kernel

        width = qkv.shape[-1]
        if kernel.takes(width, layout.max_seqlen):
            assert layout.cu_seqlens is not None
            return kernel.short_attention(qkv, layout.cu_seqlens, layout.max_seqlen, dropout)
        if dropout == 0 and flash_takes(width):
            return flash_packed_attention(qkv, layout)
    rows = rows_of(qkv, layout)
    sequences, length = rows.keep.shape
    if dropout == 0 and short_rows.takes(qkv, qkv.dtype, sequences * qkv.shape[-2], length):
        return short_rows.attention(qkv, rows.keep, rows.spread, rows.gather, rows.collect)
    return packed_attention(qkv, layout, dropout, attend_by(qkv, sequences * qkv.shape[-2], length))


def attend_by(q: Tensor, rows: int, length: int) -> Attend:
    """What computes attention where no kernel does: torch's own function, or batched products where a CPU trains in bf16.
    `rows`: sequences times heads."""
    dtype = computed_in(q)
    if dtype == torch.bfloat16 and short_rows.takes(q, dtype, rows, length):
        return short_rows.by_products
    return F.scaled_dot_product_attention


def turned(x: Tensor, rotation: tuple[Tensor, Tensor], count: int, alone: bool = True) -> Tensor:
    """(…, parts, heads, d_head), parts of what a projection gave, the first `count` of them turned by their token's place.
    `alone`: nobody else has seen it, so that it may be turned where it lies."""
    *tokens, parts, heads, width = x.shape
    without_gradients = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if without_gradients and heads > 0 and for_kernels(x) and alone:
        from pnn.kernels import rotary

        if rotary.takes(width) and list(rotation[0].shape[:-1]) == tokens:
            rotary.turn(x.view(-1, parts * heads * width), count * heads, width, rotation)
            return x
    first = rotate(x[..., :count, :, :], *(one.unsqueeze(-2) for one in rotation))
    return first if count == parts else torch.cat((first, x[..., count:, :, :]), dim=-3)


def flash_takes(width: int) -> bool:
    return width <= 256 and width % 8 == 0


def attention_waits(width: int, longest: int) -> bool:
    """Whether packed attention asks how long the sequences are, where kernels compute: if it takes the plain form after all."""
    from pnn.kernels import attention as kernel

    return not (kernel.takes(width, longest) or flash_takes(width))


def flash_packed_attention(qkv: Tensor, layout: Layout) -> Tensor:
    borders = layout.cu_seqlens
    assert borders is not None
    q, k, v = qkv.unbind(1)
    return flash(q, k, v, borders, borders, layout.max_seqlen, layout.max_seqlen)


def flash(q: Tensor, k: Tensor, v: Tensor, q_borders: Tensor, k_borders: Tensor, q_longest: int, k_longest: int) -> Tensor:
    """Queries of packed sequences, and their keys and values, of which there may be more."""
    from torch.nn.attention.varlen import varlen_attn  # exists for CUDA builds; imported where it is used

    out = varlen_attn(q, k, v, q_borders, k_borders, q_longest, k_longest)
    assert isinstance(out, Tensor)
    return out


# Tokens that halt -----------------------------------------------------------------------------------------------------


def live_attention_takes(width: int, longest: int) -> bool:
    from pnn.kernels import live

    return live.takes(width, longest)


def live_attention(q: Tensor, kv: Tensor, q_borders: Tensor, borders: Tensor, longest: int) -> Tensor:
    """Of the few queries (n, heads, d_head) that are left of packed sequences, over all keys (N, 2, heads, d_head)."""
    from pnn.kernels import live

    return live.attend(q, kv, q_borders, borders, longest)


def put_rows(rows: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """`rows`, which get these new ones where they lie; places behind the last row's are left out."""
    from pnn.kernels import live

    live.put(rows, places, new)
    return rows


def learned_settles(h: Tensor, places: Tensor | None, unit: Any, threshold: float) -> Tensor:
    """Which tokens a learned unit lets go, as a mask over all rows of h: it looks at these places alone."""
    from pnn.kernels import live

    return live.settled(h, places, unit.weight, unit.bias, threshold)


def live_tokens(
    going: Tensor, stopped: Tensor, asked: Tensor, borders: Tensor, room: Callable[[Tensor], tuple[int, int]]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """`nn/live.go_on`: both masks, then the numbers of both and the borders of the first. `room` says how many of each there
    are numbers for, given how many there are."""
    from pnn.kernels import live

    found = live.count(going, stopped, asked, borders)
    return found.live, found.beside, live.numbers(found, borders, room(found.ends[:, -1]))
