"""What removing heads is worth, beside masking them: attention layers of GPT-2's size, whole, with half of their heads removed,
and with the same half masked.

Only attention is timed: queries, keys and values, softmax, output projection of every layer, on the same random states. The
three models take turns, so that a busy or hot machine slows all of them alike; medians count. Removed and masked heads give the
same outputs, and the largest difference stands in the result. On a GPU each pass is one CUDA graph, as in learning: half the
heads are so little work that issuing it takes longer than doing it. The same passes as Python issues them stand beside.
"Reading" is their forward pass alone, as Python issues it.

Whole models read text as their users call them, beside the speed-up that counting FLOPs and bytes allows (`bench/bounds`). Both
compute as reorganised models do (`models/recorded`), so that the ratio is that of the heads. The original as transformers has
it stands beside. On a GPU they learn as well, from few rows, as a cycle lets them.

Taylor scores of all heads cost one forward and one backward pass over the data; how long that takes is given in forward passes
of the same model over the same data.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pnn.bench.bounds import reading_seconds
from pnn.bench.timing import copy_rate, machine, matrix_rate
from pnn.models.recorded import quicken
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.heads import heads
from pnn.plasticity.learning import learn
from pnn.plasticity.measure import flops_per_token
from pnn.plasticity.scores import mean_loss, prepared, score
from pnn.plasticity.surgery import prune
from pnn.plasticity.units import masked
from pnn.training.recording import Recorder
from pnn.turns import take_turns

SCORED_BATCHES = 4
ISSUED = ", issued"  # kernel by kernel, from Python
LEARNT_ROWS = 4  # of an update of learning
READING = ("whole, reading", "removed, reading")


def heads_benchmark(
    config: GPT2Config,
    rows: int,
    length: int,
    *,
    backward: bool,
    device: torch.device,
    seconds: float,
    read: tuple[int, int] = (64, 256),
) -> dict[str, Any]:
    """`seconds`: how long to take turns, at least. `read`: rows and tokens that whole models read."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = GPT2LMHeadModel(config).to(device, dtype).eval()
    half = [head for head in heads(whole) if head[1] % 2]
    removed = prune(whole, half)
    states = torch.randn(rows, length, config.n_embd, device=device, dtype=dtype)
    with ExitStack() as stack:
        hidden = GPT2LMHeadModel(config).to(device, dtype).eval()
        hidden.load_state_dict(whole.state_dict())
        stack.enter_context(masked(hidden, half))
        difference = _largest_difference(removed, hidden, states)
        runs = {
            name: _pass(model, states, backward) for name, model in (("whole", whole), ("removed", removed), ("masked", hidden))
        }
        if device.type == "cuda":
            runs = {name: _recorded(run) for name, run in runs.items()} | {f"{name}{ISSUED}": run for name, run in runs.items()}
        times = take_turns(runs, device, seconds)
        issued = {name: _pass(model, states, False) for name, model in ((READING[0], whole), (READING[1], removed))}
        times_reading = take_turns(issued, device, seconds)
    what = "forward and backward" if backward else "forward"
    shape = {"what": what, "rows": rows, "length": length, "dtype": str(dtype).removeprefix("torch.")}
    result = [{"name": name, **shape, **_summary(taken, rows * length)} for name, taken in times.items()]
    result += [{"name": name, **shape, "what": "forward", **_summary(t, rows * length)} for name, t in times_reading.items()]
    median = {row["name"]: row["milliseconds"]["median"] for row in result}
    ratios = {
        "half_heads_attention_speedup": median["whole"] / median["removed"],
        "half_heads_removed_vs_masked": median["masked"] / median["removed"],
        "half_heads_attention_speedup_reading": median[READING[0]] / median[READING[1]],
        "masking_attention_speedup": median["whole"] / median["masked"],
    }
    if device.type == "cuda":
        ratios["half_heads_attention_speedup_issued"] = median[f"whole{ISSUED}"] / median[f"removed{ISSUED}"]
    reading = _reading(whole, removed, *read, seconds)
    learning = _learning(whole, removed, LEARNT_ROWS, read[1], seconds) if device.type == "cuda" else {"rows": [], "ratios": {}}
    taylor = _taylor(whole, rows, length, device, seconds)
    return {
        **machine(),
        "model": {"layers": config.n_layer, "width": config.n_embd, "heads": config.n_head, "removed": len(half)},
        "rows": [*result, *reading["rows"], *learning["rows"], *taylor["rows"]],
        "ratios": {**ratios, **reading["ratios"], **learning["ratios"], "taylor_scores_in_forward_passes": taylor["ratio"]},
        "largest_difference_removed_and_masked": difference,
    }


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    return architecture_of(model).attentions(model)


def _pass(model: PreTrainedModel, states: Tensor, backward: bool) -> Callable[[], None]:
    """Each layer's attention once, on the same states."""
    layers, slope = _attentions(model), torch.ones_like(states)

    def forward() -> None:
        with torch.no_grad():
            for layer in layers:
                layer(states)

    def both() -> None:
        for layer in layers:
            given = states.detach().requires_grad_()
            layer(given)[0].backward(slope)
            layer.zero_grad()

    return both if backward else forward


def _recorded(run: Callable[[], None]) -> Callable[[], None]:
    """By what records the passes of learning."""

    def one(_: dict[str, Tensor]) -> tuple[Tensor, ...]:
        run()
        return ()

    recorder = Recorder(one, (), 1)

    def replay() -> None:
        with recorder.on_stream():
            recorder({})

    return replay


@torch.no_grad()
def _largest_difference(one: PreTrainedModel, other: PreTrainedModel, states: Tensor) -> float:
    pairs = zip(_attentions(one), _attentions(other), strict=True)
    return max(float((a(states)[0] - b(states)[0]).abs().max()) for a, b in pairs)


def _reading(whole: PreTrainedModel, removed: PreTrainedModel, rows: int, length: int, seconds: float) -> dict[str, Any]:
    """Whole models, called as their users call them, and the most that the FLOPs and bytes which are gone allow."""
    device = whole.device
    quick = copy.deepcopy(whole)
    quicken(quick)
    models = {"whole model": quick, "removed model": removed, "whole model, as transformers has it": whole}
    ids = torch.randint(0, whole.config.vocab_size, (rows, length), device=device)

    @torch.no_grad()
    def read(model: PreTrainedModel) -> None:
        model(ids)

    times = take_turns({name: partial(read, model) for name, model in models.items()}, device, seconds)
    found = [
        {"name": name, "what": "reading", "rows": rows, "length": length, **_summary(t, rows * length)}
        for name, t in times.items()
    ]
    ours, pruned, theirs = (row["milliseconds"]["median"] for row in found)
    rates = matrix_rate(device)["flops_per_second"]["median"], copy_rate(device)["bytes_per_second"]["median"]
    least = [reading_seconds(model, rows, length, *rates) for model in (quick, removed)]
    bound = least[0] / least[1]
    named = {
        "half_heads_model_speedup": ours / pruned,
        "half_heads_model_bound": bound,
        "half_heads_model_speedup_of_bound": ours / pruned / bound,
        "half_heads_model_bound_by_flops": flops_per_token(quick, length) / flops_per_token(removed, length),
        "half_heads_model_least_time_of_measured": 1000 * least[1] / pruned,
        "half_heads_model_speedup_vs_transformers": theirs / pruned,
    }
    return {"rows": found, "ratios": named}


def _learning(whole: PreTrainedModel, removed: PreTrainedModel, rows: int, length: int, seconds: float) -> dict[str, Any]:
    """Updates as `learn` does them; issued by Python where somebody listens to the model."""
    quick = copy.deepcopy(whole)
    quicken(quick)
    models = [copy.deepcopy(model).float() for model in (quick, removed, removed)]
    models[-1].base_model.register_forward_hook(lambda *_: None)
    ids = torch.randint(0, whole.config.vocab_size, (rows, length))
    settings: dict[str, Any] = {"steps": 1_000_000, "peak_rate": 1e-5, "multiplier": 1.0, "seed": 0}
    names = ("whole model, learning", "removed model, learning", "removed model, learning, issued")
    with ExitStack() as stack:
        runs = {}
        for name, model in zip(names, models, strict=True):
            updates = stack.enter_context(closing(learn(model, [], lambda _: {"input_ids": ids}, **settings)))
            runs[name] = partial(next, updates)
        times = take_turns(runs, whole.device, seconds, warm_up=5)  # three are issued, then one is recorded
    found = [
        {"name": name, "what": "learning", "rows": rows, "length": length, **_summary(t, rows * length)}
        for name, t in times.items()
    ]
    ours, pruned, issued = (row["milliseconds"]["median"] for row in found)
    return {
        "rows": found,
        "ratios": {"half_heads_learning_speedup": ours / pruned, "recorded_learning_speedup": issued / pruned},
    }


def _taylor(model: PreTrainedModel, rows: int, length: int, device: torch.device, seconds: float) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, model.config.vocab_size, (rows, length), generator=draw) for _ in range(SCORED_BATCHES)]
    batches = [prepared(model, {"input_ids": one, "labels": one}) for one in ids]

    @torch.no_grad()
    def forward() -> None:
        mean_loss(model, batches)

    def scores() -> None:
        score(model, batches, "gradient")

    times = take_turns({"forward pass over the data": forward, "taylor scores of all heads": scores}, device, seconds)
    tokens = rows * length * SCORED_BATCHES
    found = [
        {"name": name, "rows": rows * SCORED_BATCHES, "length": length, **_summary(t, tokens)} for name, t in times.items()
    ]
    one, other = (row["milliseconds"]["median"] for row in found)
    return {"rows": found, "ratio": other / one}


def _summary(taken: list[float], tokens: int) -> dict[str, Any]:
    median = statistics.median(taken)
    return {
        "milliseconds": {"median": 1000 * median, "low": 1000 * min(taken), "high": 1000 * max(taken)},
        "tokens_per_second": tokens / median,
        "turns": len(taken),
    }
