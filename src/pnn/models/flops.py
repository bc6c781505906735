"""FLOPs a token, counted, not measured: the work that the model asks for, whatever an implementation adds to it.

    training   6 · (Σ matrix parameters a token passes)  +  12 · L · d  for every layer or step
    inference  2 · (Σ matrix parameters a token passes)  +   4 · L · d  for every layer or step

A shared matrix counts each time it is passed. The head counts only for positions that are predicted, by their share of all
tokens; a PNN is trained after every step whose weight is above 0, so its head is passed so often in training, and once in
inference. The last step or layer, too, is only asked for predicted positions: every token passes q, k and v there, the rest
only those. A narrower table of tokens costs its widening for every token. A masked token that reads its own guess passes the
head and the table once more, forward alone, and the widening. Attention's
q kᵀ and weights · v take 2 L d each forward, and twice that backward; L is the mean number of tokens that a token attends
to: the mean of the sequences' lengths, each weighted by its tokens. Embeddings are looked up and cost nothing here; norms,
activations and the optimiser are left out, as is usual. Padding is no work: a baseline that computes it gets no credit.

A decoder's token attends to those before it, half of the row on average, and every token but a row's first is predicted. What
reads and rewrites its state (compressors, directions) is elementwise and left out; the matrices that say what to write count.

Tokens of a PNN may halt (`halting_flops`): such a token keeps its state, and others go on reading it. A live token passes the
whole block and attends; one that has halted passes the matrices of keys and values once more, for each refiner that is still
to come (as is done, also where refiners share one attention). Tokens that are not predicted are not asked for the last step, so
all steps are T for a target and T − 1 for others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pnn.models.base import token_size
from pnn.models.ddl import DDLConfig
from pnn.models.pnn import PNNConfig
from pnn.nn.transformer import TransformerLayer
from pnn.nn.updates import UPDATES
from pnn.objectives import weights_at
from pnn.schedule import drawn_from

_MATRICES: dict[str, int] = {}  # by what a config says


def block_parameters(config: Any) -> int:
    """Matrix parameters of one refinement step of a PNN, or one layer of a BERT: whatever matrices its module has."""
    width, inner = config.hidden_size, config.intermediate_size
    if isinstance(config, DDLConfig):
        generators = 0 if config.residual == "additive" else 2 * width * (config.value_channels + 1)
        return 4 * width * width + 3 * width * inner + generators
    described = f"{type(config).__name__} {vars(config)}"  # asked for each sequence: as JSON it would take a millisecond
    if described not in _MATRICES:
        with torch.device("meta"):
            block: nn.Module = UPDATES[config.update](config) if isinstance(config, PNNConfig) else TransformerLayer(config)
        _MATRICES[described] = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    return _MATRICES[described]


def head_parameters(config: Any) -> int:
    width, narrow = config.hidden_size, token_size(config)
    return narrow * config.vocab_size + (width * narrow if getattr(config, "head_transform", False) else 0)


def widening_parameters(config: Any) -> int:
    """What a token passes before the first step where the table of tokens is narrower than the state."""
    width, narrow = config.hidden_size, token_size(config)
    return 0 if narrow == width else width * narrow


def blocks(config: Any) -> int:
    if isinstance(config, PNNConfig):
        assert config.num_steps is not None
        return config.num_steps
    return config.depth if isinstance(config, DDLConfig) else config.num_hidden_layers


def passed_in_blocks(config: Any, steps: int, target_share: float) -> float:
    """Matrix parameters that a token passes until its last state."""
    if isinstance(config, DDLConfig):
        return steps * block_parameters(config)
    qkv = 3 * config.hidden_size**2
    before = widening_parameters(config) + (steps - 1) * block_parameters(config)
    return before + qkv + target_share * (block_parameters(config) - qkv)


def guessing_parameters(config: Any, steps: int) -> int:
    """Matrix parameters that a masked token passes to read its own guess: the head, the table once more, and its widening."""
    average = head_parameters(config) + token_size(config) * config.vocab_size
    return guesses(config, steps) * (average + widening_parameters(config))


def guesses(config: Any, steps: int) -> int:
    return sum(step < steps for step in getattr(config, "guess_after", None) or ())


def training_flops(config: Any, attended: float, target_share: float) -> float:
    """FLOPs of a real token, forward and backward. `attended`: L; `target_share`: predicted positions over tokens.
    Where the number of steps is drawn at every update, the mean over what may be drawn."""
    if isinstance(config, PNNConfig) and config.random_steps is not None:
        assert config.schedule is not None
        numbers = drawn_from(config.schedule, config.repeat, config.random_steps)
        return sum(_training_flops(config, steps, attended, target_share) for steps in numbers) / len(numbers)
    return _training_flops(config, blocks(config), attended, target_share)


def _training_flops(config: Any, steps: int, attended: float, target_share: float) -> float:
    supervised = 1
    if isinstance(config, PNNConfig):
        weights = [1.0] * steps if config.step_weights is None else weights_at(config.step_weights, steps)
        supervised = sum(weight > 0 for weight in weights)
    passed = passed_in_blocks(config, steps, target_share) + supervised * target_share * head_parameters(config)
    # forward alone, but for the widening's own gradient
    guessing = 2 * target_share * (guessing_parameters(config, steps) + guesses(config, steps) * widening_parameters(config))
    return 6 * passed + guessing + 12 * attended * config.hidden_size * steps


def inference_flops(config: Any, attended: float, target_share: float, num_steps: int | None = None) -> float:
    """FLOPs of a real token where only the last step is read, after `num_steps` steps (all if not given)."""
    steps = blocks(config) if num_steps is None else num_steps
    passed = passed_in_blocks(config, steps, target_share)
    passed += target_share * (head_parameters(config) + guessing_parameters(config, steps))
    return 2 * passed + 4 * attended * config.hidden_size * steps


def halting_flops(config: PNNConfig, taken: NDArray[np.int64], targets: int, labels: int | None = None) -> float:
    """FLOPs of one sequence where each token takes so many steps and then halts. Nothing is computed once all have. `labels`: a
    classifier's head chooses between so many, and not between all tokens."""
    assert config.schedule is not None
    last = int(taken.max())
    refiners_to_come = np.array([len(set(config.schedule[step:last])) for step in range(last + 1)])
    live = 2 * block_parameters(config) + 4 * len(taken) * config.hidden_size
    keys_and_values = 2 * 2 * config.hidden_size**2
    head = 2 * targets * (head_parameters(config) if labels is None else labels * config.hidden_size)
    widening = 2 * widening_parameters(config) * len(taken)
    return float(widening + live * taken.sum() + keys_and_values * refiners_to_come[taken].sum() + head)
