"""What rooms hand to one another as JSON: the keys of every result, so that a wrong one is an error before it is a run.

Fractions are fractions (0.474), losses nats per token, intervals 95 %. Keys that not every result has are `NotRequired`; older
files lack those that came later. `Json` is what only its own figure reads.
"""

from __future__ import annotations

import functools
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

Json = Mapping[str, Any]
Interval = Annotated[list[float], 2]  # low, high


def fits(value: Any, kind: Any) -> bool:
    """Whether what was read from a file is of a kind that stands below: every key that it must have, with values of its type.
    Further keys do no harm."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Annotated:
        return fits(value, inside[0]) and len(value) == inside[1]
    if origin is NotRequired:
        return fits(value, inside[0])
    if origin is list:
        return isinstance(value, list) and all(fits(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inside[1]) for one in value.values())
    if typing.is_typeddict(kind):
        hints = _hints(kind)
        needed = {key for key in kind.__required_keys__ if typing.get_origin(hints[key]) is not NotRequired}
        return (
            isinstance(value, dict)
            and needed <= value.keys()
            and all(fits(one, hints[key]) for key, one in value.items() if key in hints)
        )
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


# Numbers with intervals, and what follows from them -------------------------------------------------------------------


class EstimateJson(TypedDict):
    """`stats.Estimate` in a file; null is what could not be measured."""

    value: float | None
    interval: list[float | None]


class Control(EstimateJson):
    what: str


class Finding(TypedDict):
    """A hypothesis and its verdict; one that could not be tested has `not_done` instead of numbers."""

    hypothesis: str
    measure: NotRequired[str]
    effect: NotRequired[EstimateJson]
    margin: NotRequired[float]
    control: NotRequired[Control]
    effect_beyond_control: NotRequired[EstimateJson]
    untrained: NotRequired[EstimateJson]  # for comparison; it does not enter the verdict
    verdict: NotRequired[str]
    not_done: NotRequired[str]


# What a head reads, step by step ---------------------------------------------------------------------------------------


class Prediction(TypedDict):
    token: str
    probability: float


class Gate(TypedDict):
    """Of one token at one step, over its dimensions."""

    mean: float
    lowest: float
    highest: float


class Cell(TypedDict):
    top: list[Prediction]  # best first
    gate: NotRequired[Gate]  # what let the step's change in; step 0 has none


class Row(TypedDict):
    token: str  # as it stands in the text
    masked: bool
    answer: NotRequired[str]  # behind the mask, where it is known
    cells: list[Cell]  # after steps 0 … T
    stopped: NotRequired[int]  # after how many steps the token halts, where the model lets tokens halt


class Refining(TypedDict):
    """`read`: the steps after which the model was trained to be read. `trained`: the last of them."""

    unit: str  # "step" or "layer"
    trained: int
    read: list[int]
    rows: list[Row]


# environment.json -----------------------------------------------------------------------------------------------------


class Hardware(TypedDict):
    gpus: list[str]
    cpu: str
    threads: int


class Versions(TypedDict):
    torch: str
    transformers: str


class Commit(TypedDict):
    commit: str


class Environment(TypedDict):
    """What of it is read."""

    hardware: Hardware
    versions: Versions
    git: NotRequired[Commit | None]
    source_sha256: NotRequired[str]
    precision: NotRequired[str]  # that a run was trained in


# evaluation.json ------------------------------------------------------------------------------------------------------


class SequenceTotals(TypedDict):
    """What differences between runs are paired by, an entry per sequence (a decoder's window). evaluation_by_sequence.json has
    them for every text, by name; `validation` is the run's own."""

    targets: list[int]
    correct: list[int]
    loss: list[float]


class Accuracy(TypedDict):
    """After every step 0 … T; the last is the model's."""

    targets: int
    accuracy: float
    accuracy_interval: Interval
    accuracy_by_step: list[float]
    accuracy_by_step_interval: list[Interval]


class KindOfWord(Accuracy):
    share: float
    ceiling: float


class Commonest(TypedDict):
    """What always guessing one token would score: the commonest of the targets."""

    token: str
    accuracy: float


class MaskedScores(Accuracy):
    num_steps: int
    loss: float
    loss_by_step: list[float]
    gain_over_first_step: EstimateJson
    commonest: NotRequired[Commonest]
    ceiling: NotRequired[float]  # of the embedded corpus
    by_kind: NotRequired[dict[str, KindOfWord]]
    by_sequence: NotRequired[SequenceTotals]  # in memory: it has a file of its own


class MaskedText(MaskedScores):
    """A masked model on one text."""

    source: str
    text: dict[str, Any]
    sequences: int
    mask_probability: float
    mask_seed: int
    mask_draws: NotRequired[int]
    unknown_tokens: NotRequired[float]  # the share of the text's tokens that the vocabulary does not have, if any
    halt: NotRequired[dict[str, Any]]  # when tokens stopped, as the model's config says it; without it none did


class CausalText(TypedDict):
    """A decoder on one text."""

    source: str
    text: dict[str, Any]
    sequences: int
    context: int
    stride: int
    targets: int
    tokens: int
    words: int
    bytes: int
    loss: float
    loss_interval: Interval
    perplexity: float
    word_perplexity: NotRequired[float]  # both not of a text with many unknown tokens
    bits_per_byte: NotRequired[float]
    unknown_tokens: NotRequired[float]  # the share of such tokens, if any
    accuracy: float
    accuracy_interval: Interval
    num_steps: NotRequired[int]  # of a decoder with steps
    loss_by_step: NotRequired[list[float]]  # after steps 0, 1, …
    commonest: NotRequired[Commonest]
    by_sequence: NotRequired[SequenceTotals]


class Measured(TypedDict):
    """Which model, at the head of every evaluation."""

    checkpoint: str
    model_type: str
    parameters: int
    precision: str


class TaskScore(TypedDict):
    accuracy: float
    standard_error: float | None


class TaskRow(TaskScore):
    metric: str
    documents: int
    shots: int
    by_metric: dict[str, TaskScore]


class TasksAtShots(TypedDict):
    shots: int
    protocol: str
    limit: int | None
    tasks: dict[str, TaskRow]
    average: TaskScore


class Tasks(Measured):
    shots: dict[str, TasksAtShots]


class MaskedEvaluation(Measured, MaskedText):
    """A run's own validation text, and further sets. A bare checkpoint has only sets."""

    anatomy: NotRequired[dict[str, int]]  # parameters of each part
    sets: NotRequired[dict[str, MaskedText]]
    average: NotRequired[MaskedEvaluation]  # of the run's averaged weights


class CausalEvaluation(Measured, CausalText):
    anatomy: NotRequired[dict[str, int]]  # parameters of each part
    sets: NotRequired[dict[str, CausalText]]
    average: NotRequired[CausalEvaluation]
    tasks: NotRequired[Tasks]


Evaluation = MaskedEvaluation | CausalEvaluation
Text = MaskedText | CausalText


def texts_of(evaluation: Evaluation) -> Mapping[str, Any]:
    """The texts that were measured, by name: the run's own is `validation`."""
    own = {"validation": evaluation} if "accuracy" in evaluation else {}
    return {**own, **evaluation.get("sets", {})}


PROTOCOL = ("source", "text", "sequences", "mask_probability", "mask_seed", "context", "stride", "targets")


def same_targets(results: Sequence[Text]) -> bool:
    """Whether all were measured on the very same tokens: only then do their numbers compare."""
    return all(result.get(key) == results[0].get(key) for result in results for key in PROTOCOL)


def median_speed(metrics: Sequence[Json]) -> float | None:
    """Training tokens a second. The median, because rows that follow a start or a pause are slow."""
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    return statistics.median(speeds) if speeds else None


# pnn compare ----------------------------------------------------------------------------------------------------------


class Difference(TypedDict):
    difference: float
    interval: Interval
    verdict: str  # holds, undecided, equal


class DifferenceRow(TypedDict):
    run: str
    against: str
    accuracy: Difference
    loss: Difference
    sentence: str


class Differences(TypedDict):
    comparisons: int
    hold: int
    rows: list[DifferenceRow]


class ComparedRun(Measured):
    name: str
    run: str
    steps: int | None
    targets: int
    accuracy: float
    accuracy_interval: Interval
    loss: float
    perplexity: NotRequired[float]  # of decoders
    bits_per_byte: NotRequired[float]


class Comparison(TypedDict):
    source: str
    text: dict[str, Any]
    sequences: int
    max_length: int
    mask_probability: NotRequired[float]  # of masked models
    mask_seed: NotRequired[int]
    stride: NotRequired[int]  # of decoders
    same_targets: bool
    unknown_tokens: NotRequired[float]  # of the text, to all of the runs
    draws: int
    runs: list[ComparedRun]
    against_first: Differences
    all_pairs: Differences
    notes: list[str]


# pnn finetune ---------------------------------------------------------------------------------------------------------


class TunedSteps(TypedDict, total=False):
    """Of a model with refinement steps: what it scores if read after each."""

    by_step: dict[str, list[float]]
    score_by_step: list[float]


class TunedTask(TunedSteps):
    """A task's result.json; metrics are means over seeds, on dev."""

    task: str
    benchmark: str
    model: dict[str, Any]
    score: float
    score_is: str
    score_interval: Interval
    score_std: float | None
    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    learning_rate: float
    learning_rates_tried: list[dict[str, float]]
    seeds: list[dict[str, Any]]
    checkpoint: dict[str, int]
    settings: dict[str, Any]
    data: dict[str, Any]


# A plasticity cycle ---------------------------------------------------------------------------------------------------


class CycleRecord(TypedDict, total=False):
    """A line of a cycle's metrics.jsonl. Which keys it has follows from its phase: initial, pruning, measurement, growth,
    training, evaluation, final. Here are those that other rooms read."""

    phase: str
    model_name: str
    cycle: int
    step: int
    heads_pruned: int
    pruning_strategy: str
    pruned_heads: list[dict[str, int]]
    pruned_perplexity: float
    perplexity_change_percent: float
    heads_added: int
    growth_strategy: str
    added_heads: list[dict[str, int]]
    final_perplexity: float
    perplexity_change_from_initial: float
    heads: int
    original_heads: int
    head_map: list[list[int]]
    parameters: int
    attention_parameters: int
    flops_per_token: float
    loss: float
    loss_interval: Interval | None
    perplexity: float
    rows: int
    row_tokens: int
    recovery: float
