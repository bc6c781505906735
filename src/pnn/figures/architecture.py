"""The models side by side, drawn from their configs: what runs at which step, and which weights are new and which used again.

Same colour, same weights. A BERT baseline is a stack of layers in shades of its colour, a PNN one refiner drawn as often as
it is applied, with a dashed arrow from each use to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from pnn.figures.anatomy import Anatomy, anatomy
from pnn.figures.style import INK, NORMAL, QUIET, SMALL, colours, ink_on, short_name, styled, tint
from pnn.kinds import of_result
from pnn.numbers import per_cent, short_count
from pnn.results import Evaluation, Json

# Inches: one axes unit is one inch, so that boxes and letters keep their proportions for any number of steps
COLUMN, BOX_LEFT, BOX_RIGHT, READ_LEFT = 3.2, 0.55, 2.45, 2.55
BOX_HEIGHT, PITCH = 0.32, 0.45
HEADER, FOOTER, LINE = 0.72, 0.42, 0.15
LONGEST = 56  # letters of a line above a model
COLUMNS = 3  # models of a row
NEUTRAL = "#ececec"


@styled
def architecture(configs: Mapping[str, Json], evaluations: Mapping[str, Evaluation] | None = None) -> Figure:
    """`configs`: config.json of each model by name. With evaluations, sizes stand in the boxes and accuracies, or losses of a
    causal PNN, beside them."""
    evaluations = evaluations or {}
    bodies = {name: anatomy(config) for name, config in configs.items()}
    summaries = {name: _summary(body, evaluations.get(name)) for name, body in bodies.items()}
    boxes = max(len(body.schedule) for body in bodies.values()) + 2  # embeddings and head
    height = FOOTER + boxes * PITCH + HEADER + LINE * max(text.count("\n") for text in summaries.values())
    columns = min(len(bodies), COLUMNS)
    rows = math.ceil(len(bodies) / columns)
    figure = Figure(figsize=(columns * COLUMN, rows * height))
    colour = colours(configs)
    for index, (name, body) in enumerate(bodies.items()):
        row, column = divmod(index, columns)
        axes = figure.add_axes((column / columns, 1 - (row + 1) / rows, 1 / columns, 1 / rows))
        axes.set(xlim=(0, COLUMN), ylim=(0, height))
        axes.axis("off")
        top = _draw_model(axes, body, colour[name], evaluations.get(name), configs[name].get("step_weights"))
        centre, lines = (BOX_LEFT + BOX_RIGHT) / 2, summaries[name].count("\n")
        axes.text(centre, top + 0.08, summaries[name], ha="center", va="bottom", fontsize=SMALL)
        high = top + 0.36 + LINE * lines
        axes.text(centre, high, short_name(name), ha="center", fontsize=NORMAL + 2, weight="bold", color=colour[name])
    return figure


def _summary(body: Anatomy, evaluation: Evaluation | None) -> str:
    """What stands above a model, in one line or two."""
    if evaluation is None:
        return body.describe()
    counted, size = evaluation.get("anatomy", {}), f"{short_count(evaluation['parameters'])} parameters"
    attention = f" ({short_count(counted['attention'])})" if "attention" in counted else ""  # that all refiners share
    one_line = f"{size}, {body.describe()}{attention}"
    return one_line if len(one_line) <= LONGEST else one_line.replace(", ", "\n", 1)


def _draw_model(
    axes: Axes,
    body: Anatomy,
    colour: str,
    evaluation: Evaluation | None,
    weights: Sequence[float] | None,
) -> float:
    """Returns how high it is."""
    steps = len(body.schedule)
    centres = [FOOTER + (index + 0.5) * PITCH for index in range(steps + 2)]
    counted = {} if evaluation is None else evaluation.get("anatomy", {})  # results of an older version have no sizes
    sizes = {part: short_count(count) for part, count in counted.items()}

    _box(axes, centres[0], NEUTRAL, "Embeddings", sizes.get("embeddings", ""))
    for step, block in enumerate(body.schedule, start=1):
        used_before = block in body.schedule[: step - 1]
        size = "reused" if used_before else sizes.get("block", "")
        shade = tint(colour, 0.15 + 0.8 * (block + 1) / body.num_blocks)
        _box(axes, centres[step], shade, _block_label(body, step, block), size)
        if used_before:
            previous = max(s for s in range(1, step) if body.schedule[s - 1] == block)
            _reuse_arrow(axes, centres[previous], centres[step], tint(colour, 0.55 + 0.45 * (block + 1) / body.num_blocks))
    _box(axes, centres[-1], NEUTRAL, "Head", sizes.get("head", ""))
    for below, above in pairwise(centres):
        _flow_arrow(axes, below, above)
    if body.num_blocks < steps:
        middle = (centres[1] + centres[steps]) / 2
        text = "same weights reused" if steps >= 3 else "reused"
        axes.text(0.1, middle, text, rotation=90, ha="center", va="center", fontsize=SMALL, color=colour)

    if evaluation is not None:
        _readings(axes, centres, evaluation, weights)
    return centres[-1] + PITCH / 2


def _block_label(body: Anatomy, step: int, block: int) -> str:
    if body.block_name == "layer":
        return f"Layer {block + 1}"
    letter = f" {chr(ord('A') + block)}" if 1 < body.num_blocks <= 26 else f" {block}" if body.num_blocks > 26 else ""
    return f"Step {step} · refiner{letter}"


def _box(axes: Axes, centre: float, colour: str, label: str, size: str) -> None:
    bottom, width = centre - BOX_HEIGHT / 2, BOX_RIGHT - BOX_LEFT
    shape = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((BOX_LEFT, bottom), width, BOX_HEIGHT, boxstyle=shape, facecolor=colour, edgecolor="none"))
    ink = ink_on(colour)
    axes.text(BOX_LEFT + 0.1, centre, label, ha="left", va="center", fontsize=NORMAL, color=ink)
    axes.text(BOX_RIGHT - 0.1, centre, size, ha="right", va="center", fontsize=SMALL, color=ink)


def _flow_arrow(axes: Axes, below: float, above: float) -> None:
    x = (BOX_LEFT + BOX_RIGHT) / 2
    ends = ((x, below + BOX_HEIGHT / 2), (x, above - BOX_HEIGHT / 2))
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=6, shrinkA=0, shrinkB=0, color=QUIET, lw=0.8))


def _reuse_arrow(axes: Axes, below: float, above: float, colour: str) -> None:
    """From one use of a block to its next, bulging to the left by the same amount however far apart they are."""
    bend = -min(1.0, 0.5 / (above - below))
    axes.add_patch(
        FancyArrowPatch(
            (BOX_LEFT - 0.02, below + 0.06),
            (BOX_LEFT - 0.02, above - 0.06),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=8,
            shrinkA=0,
            shrinkB=0,
            color=colour,
            lw=1.2,
            linestyle=(0, (3, 2)),
        )
    )


def _readings(axes: Axes, centres: list[float], evaluation: Evaluation, weights: Sequence[float] | None) -> None:
    """The accuracy, or a decoder's loss, if the head reads the state at this height. Grey where the head was never trained to:
    `weights` has 0."""
    measure = next((name for name in ("accuracy", "loss") if f"{name}_by_step" in evaluation), None)
    if measure is None:  # a decoder without steps: its head reads the end alone
        return
    values: Sequence[float] = evaluation[f"{measure}_by_step"]  # type: ignore[literal-required]
    trained = of_result(evaluation).has_steps
    axes.text(READ_LEFT, centres[-1], f"{measure}\nread here", va="center", fontsize=SMALL - 1, color=QUIET)
    for step, value in enumerate(values):
        last = step == len(values) - 1
        proper = last or (trained and step > 0 and (weights is None or weights[step - 1] > 0))
        axes.text(
            READ_LEFT,
            centres[step],
            per_cent(value) if measure == "accuracy" else f"{value:.3f}",
            va="center",
            fontsize=NORMAL if proper else SMALL,
            color=INK if proper else QUIET,
            weight="bold" if last else "normal",
        )
    some = "step 0 and steps of weight 0 are" if weights and 0 in weights else "step 0 is"
    note = f"grey: {some} not trained" if trained else "grey: the head was trained on the last layer only"
    axes.text((BOX_LEFT + BOX_RIGHT) / 2, FOOTER - 0.2, note, ha="center", fontsize=SMALL - 1, color=QUIET)
