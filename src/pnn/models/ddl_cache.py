"""What a DDL decoder remembers of the tokens before: keys and values, and what its convolutions over tokens read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pnn.nn.delta_rule import InputExpansion, TokenCompressor


class DDLCache(DynamicCache):
    """Keys and values, and for convolutions over tokens the last few steps of what each of them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[str, Tensor] = {}

    def swap_history(self, name: str, x: Tensor, size: int) -> Tensor:
        """What came before x, (B, size − 1, …), zeros at the start of a text; x's own end is kept for the next call."""
        before = self.histories.get(name)
        if before is None:
            before = x.new_zeros(len(x), size - 1, *x.shape[2:])
        self.histories[name] = torch.cat((before, x[:, -(size - 1) :]), dim=1)[:, -(size - 1) :].clone()
        return before

    def _change_histories(self, change: Any) -> None:
        self.histories = {name: change(history) for name, history in self.histories.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change_histories(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_histories(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_histories(lambda x: x[indices])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        if self.histories:
            raise NotImplementedError("a cache with histories of token convolutions cannot be cut back")
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        self.histories = {}


class Histories:
    """Hands each convolution over tokens what came before, if there is a cache. Padding is zero to them. Their names are asked
    for only then: a name in compiled code would make it one for each layer."""

    def __init__(self, cache: DDLCache | None, keep: Tensor | None):
        self.cache, self.keep = cache, keep

    def apply(self, module: nn.Module, x: Tensor, name: Callable[[], str]) -> Tensor:
        size = len(module.kernel) if isinstance(module, TokenCompressor | InputExpansion) else 1
        if size == 1:
            return module(x)
        if self.keep is not None:
            x = x * self.keep.view(*self.keep.shape, *[1] * (x.dim() - 2)).to(x.dtype)
        return module(x, None if self.cache is None else self.cache.swap_history(name(), x, size))
