"""What a decoder remembers of the tokens before: keys and values, and what its convolutions over tokens read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pnn.nn.delta_rule import InputExpansion, TokenCompressor


class DecoderCache(DynamicCache):
    """Keys and values, and for convolutions over tokens the last few steps of what each of them reads. While text is generated
    on a GPU all of it may lie in the buffers of recorded `steps` (`decoder_steps`)."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[str, Tensor] = {}
        self.all_real = True  # no padding so far
        self.steps: Any = None  # a `decoder_steps.Steps`
        self.may_record = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self.steps is None else int(self.steps.length)

    def forget(self) -> None:
        """What the buffers hold now."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()
        self.histories = {}

    def leave_buffers(self, for_good: bool = False) -> None:
        """`for_good`: where rows are reordered at every step (beams), moving to and fro would cost more than it gains."""
        self.may_record = self.may_record and not for_good
        if self.steps is not None:
            steps, self.steps = self.steps, None
            steps.give_back(self)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: recordings cannot be copied."""
        self.leave_buffers()
        return self.__dict__

    def swap_history(self, name: str, x: Tensor, size: int) -> Tensor:
        """What came before x, (B, size − 1, …), zeros at the start of a text; x's own end is kept for the next call."""
        before = self.histories.get(name)
        if before is None:
            before = x.new_zeros(len(x), size - 1, *x.shape[2:])
        self.histories[name] = torch.cat((before, x[:, -(size - 1) :]), dim=1)[:, -(size - 1) :].clone()
        return before

    def buffer(self, name: str) -> Tensor | None:
        """A history that may be moved on in place: only recorded steps have such."""
        return None

    def _change_histories(self, change: Any) -> None:
        self.histories = {name: change(history) for name, history in self.histories.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.leave_buffers(for_good=True)
        super().reorder_cache(beam_idx)
        self._change_histories(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.leave_buffers(for_good=True)
        super().batch_repeat_interleave(repeats)
        self._change_histories(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.leave_buffers(for_good=True)
        super().batch_select_indices(indices)
        self._change_histories(lambda x: x[indices])

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self.leave_buffers(for_good=True)
        if self.histories:
            raise NotImplementedError("a cache with histories of token convolutions cannot be cut back")
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        self.leave_buffers()
        super().reset()
        self.histories, self.all_real = {}, True


class Histories:
    """Hands each convolution over tokens what came before, if there is a cache. Padding is zero to them. Their names are asked
    for only then: a name in compiled code would make it one for each layer."""

    def __init__(self, cache: Any, keep: Tensor | None):
        """`cache`: anything with a DecoderCache's `swap_history` and `buffer`, or None."""
        self.cache, self.keep = cache, keep

    def buffer(self, name: Callable[[], str]) -> Tensor | None:
        return None if self.cache is None else self.cache.buffer(name())

    def apply(self, module: nn.Module, x: Tensor, name: Callable[[], str]) -> Tensor:
        size = len(module.kernel) if isinstance(module, TokenCompressor | InputExpansion) else 1
        if size == 1:
            return module(x)
        if self.keep is not None:
            x = x * self.keep.view(*self.keep.shape, *[1] * (x.dim() - 2)).to(x.dtype)
        return module(x, None if self.cache is None else self.cache.swap_history(name(), x, size))
