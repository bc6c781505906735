"""The arms of a sweep, one below the other: every seed a dot, the mean with its interval over seeds, one panel per text."""

from __future__ import annotations

from matplotlib.figure import Figure

from pnn.figures.style import INK, PALETTE, SMALL, WIDTH, styled
from pnn.numbers import short_count
from pnn.results import Json

ROW_HEIGHT = 0.42


@styled
def sweep(result: Json) -> Figure:
    """`result`: sweep.json."""
    arms = [arm for arm in result["arms"] if arm["seeds"]]
    texts = list(arms[0]["texts"])
    figure = Figure(figsize=(WIDTH, 1.0 + ROW_HEIGHT * len(arms)), layout="constrained")
    panels = figure.subplots(1, len(texts), sharey=True, squeeze=False)[0]
    for axes, text in zip(panels, texts, strict=True):
        measure = arms[0]["texts"][text]["measure"]
        scale = 100 if measure == "accuracy" else 1
        for row, arm in enumerate(arms):
            found = arm["texts"][text]
            low, high = found["interval"]
            if low is not None:
                axes.plot([scale * low, scale * high], [row, row], color=PALETTE[0], lw=1.6, solid_capstyle="butt")
            axes.plot([scale * found["value"]], [row], "D", ms=5, color=PALETTE[0])
            seeds = [scale * value for value in found["by_seed"]]
            axes.plot(seeds, [row] * len(seeds), "o", ms=3, color=INK, alpha=0.5)
        axes.set_title(text, fontsize=SMALL + 1)
        axes.set_xlabel("masked tokens right, %" if measure == "accuracy" else "loss, nats per token")
        axes.grid(axis="x", lw=0.4)
    panels[0].set_yticks(range(len(arms)), [f"{arm['name']}\n{short_count(arm['parameters'])} parameters" for arm in arms])
    panels[0].set_ylim(len(arms) - 0.5, -0.5)  # the first arm on top
    return figure
