"""The steps between matrix products: dropout, GELU and LayerNorm, in the combinations that occur.

Each function is one line of plain torch. On a GPU in 16 bit a kernel does the same in one pass over memory, because there
these steps, not the products, would take most of the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn import kernels


def computed_in(x: Tensor) -> torch.dtype:
    """The precision of products with x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def kernels_compute(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels take over there: in 16 bit, on a GPU that Triton knows well (the Ampere generation or later)."""
    if device.type != "cuda" or not kernels.HAS_TRITON or dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def for_kernels(x: Tensor) -> bool:
    return kernels_compute(x.device, computed_in(x))


def untouched(module: nn.Module) -> bool:
    """Whether a kernel may compute in this module's stead: nobody listens to it or changes what it returns."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks)


def product(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(W x, b) where kernels run: the next one adds the bias on its way. Elsewhere, and for a layer that was hooked or
    replaced (by an adapter, say), (W x + b, None)."""
    if for_kernels(x) and type(linear) is nn.Linear and untouched(linear):
        return F.linear(x, linear.weight), linear.bias
    return linear(x), None


def probability(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def drop(x: Tensor, dropout: nn.Dropout) -> Tensor:
    if for_kernels(x):
        from pnn.kernels import pointwise

        return pointwise.dropout(x, probability(dropout))
    return dropout(x)


def gelu_drop(x: Tensor, bias: Tensor | None, dropout: nn.Dropout) -> Tensor:
    """dropout(GELU(x + bias))."""
    if for_kernels(x) and bias is not None:
        from pnn.kernels import pointwise

        return pointwise.gelu_dropout(x, bias, probability(dropout))
    return dropout(F.gelu(x if bias is None else x + bias))


def drop_add_norm(
    x: Tensor, bias: Tensor | None, dropout: nn.Dropout | None, residual: Tensor | None, norm: nn.LayerNorm
) -> Tensor:
    """LayerNorm(residual + dropout(x + bias)). A kernel leaves it in 16 bit: the sum and the statistics inside are in fp32,
    and what follows is a product in 16 bit or, for a stream of states, as good (see docs/decisions.md)."""
    if for_kernels(x) and untouched(norm):
        from pnn.kernels import norm as kernel

        if kernel.takes(x):
            p = 0.0 if dropout is None else probability(dropout)
            if residual is not None and residual.shape != x.shape:  # rows that share their positions: a kernel reads by the row
                residual = residual.expand_as(x)
            return kernel.dropout_add_norm(x, bias, residual, norm.weight, norm.bias, norm.eps, p, computed_in(x))
    x = x if bias is None else x + bias
    dropped = x if dropout is None else dropout(x)
    return norm(dropped if residual is None else residual + dropped)
