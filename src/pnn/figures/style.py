"""How figures look: colours that people with colour-blindness can tell apart, sizes that survive print, and saving.

Figures are built with matplotlib's objects alone, no pyplot, so that nothing global is left behind and no display is needed.
Every run keeps its colour through all figures of a report: it follows from the run's place in the list.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pnn.files import make_folder, write_bytes
from pnn.numbers import bare_per_cent

P = ParamSpec("P")

DPI = 150
WIDTH = 7.4  # inches: the text width of an A4 page
INK, QUIET, GRID = "#222222", "#6b6b6b", "#e3e3e3"
# Okabe and Ito's palette, without yellow (too faint on white) and black (which stands for the best possible)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SMALL, NORMAL = 8.0, 9.0  # points

RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.labelsize": NORMAL,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "text.color": INK,
    "text.parse_math": False,  # a run may be called "a$b$c"
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "figure.facecolor": "white",
}

SHORTER = {  # of what matplotlib writes as SVG
    r"<metadata>.*?</metadata>|<!-- .*? -->": "",
    r"DejaVuSans-": "d",
    r'transform="translate\((\S+) 0\)"/>': r'x="\1"/>',
    r"\s*\n\s*": "\n",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under this style without leaving it set for the rest of the program."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with rc_context(RC):
            return draw(*args, **kwargs)

    return wrapper


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with rc_context(RC):  # matplotlib makes some ticks only now
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """Sharp at any size. Letters are shapes: it looks the same where the font is missing. The same figure gives the same bytes,
    half of what matplotlib writes: hundredths of a point are enough, and indentation is for nobody."""
    buffer = io.StringIO()
    with rc_context(RC | {"svg.hashsalt": "pnn"}):
        figure.savefig(buffer, format="svg", dpi=DPI, metadata={"Date": None})
    text = re.sub(r"-?[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", buffer.getvalue())
    for long, short in SHORTER.items():
        text = re.sub(long, short, text, flags=re.DOTALL)
    return text.encode()


def save(image: bytes, path: Path) -> Path:
    """Write an image so that a reader never sees half of one."""
    make_folder(path.parent)
    write_bytes(path, image)
    return path


# Colours ----------------------------------------------------------------------------------------------------------


def colours(names: Iterable[str]) -> dict[str, str]:
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def tint(colour: str, strength: float) -> str:
    """The colour mixed with white; strength 1 leaves it as it is."""
    return to_hex([1 - strength * (1 - channel) for channel in to_rgb(colour)])


def ink_on(colour: str) -> str:
    """Dark or white letters, whichever stands out more from this colour (WCAG's relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return INK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.25 else "white"


# Axes and labels --------------------------------------------------------------------------------------------------


def short_name(name: str, longest: int = 26) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def per_cent_axis(axes: Axes) -> None:
    """Write a vertical axis of fractions in per cent, with as many digits as its ticks need."""

    def write(value: float, _: object) -> str:
        ticks = axes.yaxis.get_majorticklocs()
        spacing = 100 * abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 1.0
        exact = (digits for digits in range(4) if abs(spacing * 10**digits - round(spacing * 10**digits)) < 1e-6 * spacing)
        return bare_per_cent(value, next(exact, 4))

    axes.yaxis.set_major_formatter(FuncFormatter(write))


def label_ends(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write (height, text, colour) labels to the right of an axes, each at its height but never one over another."""
    low, high = axes.get_ylim()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    line = 1.45 * SMALL / 72 / (0.72 * figure.get_figheight())  # a line of text, as a share of the axes' height
    wanted = sorted(((height - low) / (high - low), text, colour) for height, text, colour in labels)
    for (height, text, colour), place in zip(wanted, spread([w[0] for w in wanted], line), strict=True):
        axes.plot([1.005, 1.035], [height, place], transform=axes.transAxes, color=colour, lw=0.8, clip_on=False)
        axes.text(1.045, place, text, transform=axes.transAxes, color=colour, va="center", fontsize=SMALL)


def spread(places: list[float], gap: float) -> list[float]:
    """Move ascending places apart until each is at least `gap` above the one before, keeping every cluster's centre."""
    clusters: list[list[float]] = []
    for place in places:
        clusters.append([place])
        while len(clusters) > 1 and _start(clusters[-1], gap) < _start(clusters[-2], gap) + gap * len(clusters[-2]):
            last = clusters.pop()
            clusters[-1] += last
    return [_start(cluster, gap) + gap * index for cluster in clusters for index in range(len(cluster))]


def _start(cluster: list[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2
