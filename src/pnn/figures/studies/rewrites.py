"""Does a Deep Delta decoder rewrite its state? Gates, read-out errors, what taking rewrites away costs, and whether
sublayers write along the same directions."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import (
    AMBER,
    BLUE,
    CONTROL,
    GREEN,
    MARKERS,
    ORANGE,
    PALE,
    PINK,
    SKY,
    Array,
    bars,
    estimates,
    from_zero,
    line,
    step_axis,
    titled,
)
from pnn.figures.style import INK, QUIET, SMALL, WIDTH, per_cent_axis, styled
from pnn.numbers import count, per_cent, written
from pnn.results import Json

PART = {"attention": BLUE, "mlp": ORANGE}
PART_NAME = {"attention": "attention", "mlp": "MLP"}
REGIME = {"skip": "#c9c9c9", "partial": SKY, "match": GREEN, "over-relax": AMBER, "reflect": ORANGE}
KIND = dict(
    zip(("word start", "continuation", "punctuation", "number", "break"), (BLUE, ORANGE, GREEN, PINK, AMBER), strict=True)
)
HALFWAY = "layer (MLP half-way to the next)"


@styled
def rewrites(result: Json) -> Figure:
    figure = Figure(figsize=(WIDTH, 15.0), layout=ConstrainedLayoutEngine(h_pad=0.09))
    rows = GridSpec(5, 1, figure, height_ratios=(1, 1, 1, 1.15, 1.25))

    def panels(row: int) -> list[Axes]:  # columns of a row need not stand under those of another
        columns = rows[row].subgridspec(1, 2)
        return [figure.add_subplot(columns[0, i]) for i in (0, 1)]

    _distributions(figure, panels(0), result)
    for row, draw in ((1, (_kinds, _regimes)), (2, (_errors, _left)), (3, (_layers, _other_interventions))):
        for axes, one in zip(panels(row), draw, strict=True):
            one(axes, result)
    _reuse(figure, panels(4), result)
    write_verdicts(figure, result["findings"])
    return figure


def _of(result: Json, part: str, *path: str) -> list[Any]:
    """What the path leads to in every sublayer of this part."""
    found = []
    for sublayer in result["sublayers"]:
        if sublayer["part"] == part:
            for key in path:
                sublayer = sublayer[key]
            found.append(sublayer)
    return found


def _numbers(result: Json) -> Array:
    """Of layers."""
    return np.arange(1.0, result["layers"] + 1)


def _half_steps(result: Json) -> Array:
    """Where each sublayer stands on an axis of layers."""
    return 1 + np.arange(2 * result["layers"]) / 2


def _distributions(figure: Figure, panels: list[Axes], result: Json) -> None:
    shares = {part: np.array(_of(result, part, "beta", "histogram")).T / max(result["tokens"], 1) for part in PART}
    most = max(share.max() for share in shares.values())
    for axes, (part, share) in zip(panels, shares.items(), strict=True):
        extent = (0.5, result["layers"] + 0.5, 0.0, 2.0)
        picture = axes.imshow(share, aspect="auto", origin="lower", extent=extent, cmap="Blues", vmin=0, vmax=most)
        values, _ = estimates(_of(result, part, "beta", "mean"))
        axes.plot(_numbers(result), values, color=ORANGE, marker="o", ms=4, lw=1.4, mec="white", mew=0.7)
        axes.axhline(1, color=INK, lw=0.7, ls="--")
        step_axis(axes, 1, result["layers"], "layer")
        axes.set(ylabel="β", ylim=(0, 2), xlim=extent[:2])
        axes.grid(False)
        key = Line2D([], [], color=ORANGE, marker="o", ms=4, label="mean")
        titled(axes, f"Gates of {PART_NAME[part]}, {count(result['tokens'])} tokens", [key])
    bar = figure.colorbar(picture, ax=panels, pad=0.01, aspect=18)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("share of tokens (%)", fontsize=SMALL)
    per_cent_axis(bar.ax)


def _kinds(axes: Axes, result: Json) -> None:
    keys = []
    for (kind, colour), marker in zip(KIND.items(), MARKERS, strict=False):
        if result["tokens_by_kind"][kind]:
            values = [sublayer["beta"]["by_kind"][kind] for sublayer in result["sublayers"]]
            axes.plot(_half_steps(result), values, color=colour, marker=marker, ms=3.6, lw=1.2)
            keys.append(Line2D([], [], color=colour, marker=marker, ms=3.6, label=kind))
    axes.axhline(1, color=QUIET, lw=0.9, ls="--")
    step_axis(axes, 1, result["layers"], HALFWAY)
    axes.set(ylabel="mean β", ylim=(0, 2), xlim=(0.6, result["layers"] + 0.9))
    _two_lines_of_keys(axes, "β by kind of token", keys)


def _regimes(axes: Axes, result: Json) -> None:
    bottom = np.zeros(len(result["sublayers"]))
    for name, colour in REGIME.items():
        shares = np.array([sublayer["regimes"][name] for sublayer in result["sublayers"]])
        axes.bar(_half_steps(result), shares, 0.44, bottom, color=colour)
        bottom += shares
    step_axis(axes, 1, result["layers"], HALFWAY)
    axes.set(ylabel="share of tokens (%)", ylim=(0, 1), xlim=(0.6, result["layers"] + 0.9))
    per_cent_axis(axes)
    limits = ("< 0.1", "< 0.9", "< 1.1", "< 1.9", "≥ 1.9")
    keys = [Patch(color=colour, label=f"{name} {limit}") for (name, colour), limit in zip(REGIME.items(), limits, strict=True)]
    _two_lines_of_keys(axes, "How often β is where", keys)


def _two_lines_of_keys(axes: Axes, title: str, keys: list[Any]) -> None:
    titled(axes, title, keys, columns=3)
    axes.set_title(title, pad=34)


def _errors(axes: Axes, result: Json) -> None:
    for (part, colour), marker in zip(PART.items(), MARKERS, strict=False):
        line(axes, _numbers(result), _of(result, part, "error", "before"), colour, **PALE | {"marker": marker})
        line(axes, _numbers(result), _of(result, part, "error", "after"), colour, marker=marker)
    from_zero(axes)
    axes.set_ylabel("|kᵀX − v|, mean over tokens")
    step_axis(axes, 1, result["layers"], "layer")
    keys = _part_keys()
    keys.append(Line2D([], [], color=CONTROL, ls=(0, (4, 2)), marker="o", ms=4, mfc="white", label="before"))
    keys.append(Line2D([], [], color=CONTROL, marker="o", ms=4.5, label="after"))
    titled(axes, "Distance of the read-out from its target", keys)


def _part_keys() -> list[Any]:
    marks = zip(PART.items(), MARKERS, strict=False)
    return [Line2D([], [], color=colour, marker=marker, ms=4.5, label=PART_NAME[part]) for (part, colour), marker in marks]


def _left(axes: Axes, result: Json) -> None:
    keys = _part_keys()
    for (part, colour), marker in zip(PART.items(), MARKERS, strict=False):
        line(axes, _numbers(result), _of(result, part, "error", "left"), colour, marker=marker)
        if result["erases"]:
            values, _ = estimates(_of(result, part, "error", "left_by_the_rule"))
            axes.plot(_numbers(result), values, ls="none", marker="+", ms=9, color=INK, mew=1.0)
    if result["erases"]:
        keys.append(Line2D([], [], ls="none", color=INK, marker="+", ms=8, label="|1 − β| of it"))
    axes.axhline(1, color=QUIET, lw=0.9, ls="--")
    from_zero(axes)
    axes.set_ylabel("error after / before (%)")
    per_cent_axis(axes)
    step_axis(axes, 1, result["layers"], "layer")
    titled(axes, "How much of the error is left", keys)


def _layers(axes: Axes, result: Json) -> None:
    found = [one["rise"] for one in result["interventions"]["shut_by_layer"]]
    bars(axes, _numbers(result), found, BLUE)
    axes.axhline(0, color=QUIET, lw=0.8)
    axes.set_ylabel("rise in loss (nats per token)")
    step_axis(axes, 1, result["layers"], "layer")
    axes.set_title("Gates of one layer held shut")


def _other_interventions(axes: Axes, result: Json) -> None:
    done, tokens = result["interventions"], max(result["tokens"], 1)
    rows: list[tuple[str, Json | None, str]] = [("all gates shut", done["shut_all"], BLUE)]
    rows += [(f"{PART_NAME[part]} shut", done["shut_by_part"][part], BLUE) for part in PART]
    rows += [
        (f"shut at {kind} ({per_cent(result['tokens_by_kind'][kind] / tokens, 0)})", done["shut_by_kind"][kind], SKY)
        for kind in KIND
    ]
    rows += [("no erasure", done["no_erasure"], ORANGE), ("β at its mean", done["mean_beta"], GREEN)]
    rows += [("β = 1", done["beta_one"], GREEN)]
    rows = [row for row in rows if row[1] is not None]
    values, reach = estimates([found["rise"] for _, found, _ in rows if found is not None])
    places = np.arange(len(rows))
    axes.barh(places, values, 0.62, color=[colour for _, _, colour in rows])
    axes.errorbar(values, places, xerr=reach, color=INK, ls="none", elinewidth=0.9, capsize=2)
    for place, value in enumerate(values):
        axes.text(1.02, place, written(value, 3), transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
    axes.axvline(0, color=QUIET, lw=0.8)
    axes.set_yticks(places, [name for name, _, _ in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="rise in loss (nats per token)")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_title("Other interventions")


def _reuse(figure: Figure, panels: list[Axes], result: Json) -> None:
    directions = result["directions"]
    same, other = (np.array(directions[name]) for name in ("same_token", "other_tokens"))
    np.fill_diagonal(same, np.nan)  # a direction with itself
    most = max(np.nanmax(same), other.max())
    pictures = (("the same token", same, "mean_same_token"), ("two tokens of a row", other, "mean_other_tokens"))
    for axes, (what, values, mean) in zip(panels, pictures, strict=True):
        axes.set_facecolor("#e8e8e8")
        picture = axes.imshow(values, cmap="Blues", vmin=0, vmax=most, interpolation="nearest")
        every = -(-result["layers"] // 12)
        numbers = list(range(1, result["layers"] + 1, every))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([2 * n - 1.5 for n in numbers], [str(n) for n in numbers])
        axes.set(xlabel="layer (attention, MLP)", ylabel="layer (attention, MLP)")
        axes.grid(False)
        axes.set_title(f"Reuse of directions, {what}:\nmean |cos| {written(directions[mean]['value'], 3)}")
    bar = figure.colorbar(picture, ax=panels, pad=0.01, aspect=18)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL)
    bar.ax.axhline(directions["chance"], color=ORANGE, lw=2)
    bar.set_label(f"mean |cos|; by chance {written(directions['chance'], 3)} (orange)", fontsize=SMALL)
