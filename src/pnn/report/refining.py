"""A text's grid of predictions, tokens × steps, as a piece of page: in report.html, on the site and in `pnn explore`.

The slider, the switch to gates and the cells that can be pointed at are in refining.js, the looks in refining.css. Nothing asks
a server: all steps are in the piece.
"""

from __future__ import annotations

from importlib import resources
from itertools import count

from pnn.numbers import bare_per_cent, written
from pnn.report.markup import Html, html, join, tag
from pnn.results import Cell, Refining, Row

_numbers = count()  # tells apart the radio buttons of several grids on one page


def grid(found: Refining, title: str, *, only_masks: bool = False) -> Html:
    """`found`: what `evaluation.refining` gives. `only_masks`: begin with the masked tokens alone."""
    steps, unit = len(found["rows"][0]["cells"]) - 1, found["unit"]
    start = min(steps, found["trained"])  # a calibrated model takes fewer steps than it was trained with
    head = [
        tag("th", step or "input", scope="col", data_name=f"{unit} {step}" if step else "input", **_step(step, found))
        for step in range(steps + 1)
    ]
    rows = [
        tag("tr", tag("th", _name(row), scope="row"), *(_cell(row, t, found) for t in range(steps + 1)), **_masked(row))
        for row in found["rows"]
    ]
    table = tag("table", tag("thead", tag("tr", tag("th", "token", scope="col"), *head)), tag("tbody", *rows), class_="cells")
    label = f"Predictions of {title} by token and {unit}"
    return tag(
        "div",
        tag("p", title, class_="name"),
        _controls(found, steps, start, only_masks),
        tag("p", *_reading(found, start), class_="reading"),
        *_legend(found),
        tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=label),
        tag("p", f"Point at a cell: what else did the head read after that {unit}?", class_="detail", aria_live="polite"),
        tag("p", "Italic: the head was not trained to read there.", *_halting(found), class_="note"),
        class_=f"refining pointable{' masks' * only_masks}",
    )


def resource(name: str) -> str:
    """Of refining.css, refining.js and page.css. A page that holds a grid has to carry the first two once."""
    return (resources.files("pnn.report") / name).read_text(encoding="utf-8")


def _halting(found: Refining) -> list[str]:
    if "stopped" not in found["rows"][0]:
        return []
    return [f" A bar: in use the token stops after that {found['unit']}. What follows is computed here to be looked at."]


def _step(step: int, found: Refining) -> dict[str, str]:
    """Columns whose states the head was not trained to read are quiet."""
    return {} if step in found["read"] else {"class_": "quiet"}


def _name(row: Row) -> Html:
    return join([row["token"], *([" ", tag("small", row["answer"])] if "answer" in row else [])])


def _masked(row: Row) -> dict[str, str]:
    return {"class_": "masked"} if row["masked"] else {}


def _cell(row: Row, step: int, found: Refining) -> Html:
    cell: Cell = row["cells"][step]
    best, gate = cell["top"][0], cell.get("gate")
    styles = [f"--p:{best['probability']:.3f}"]
    shown: list[object] = [tag("span", best["token"], tag("small", _share(best["probability"])))]
    told = ", ".join(f"{one['token']}\u00a0{_share(one['probability'])}" for one in cell["top"]) + "."
    if gate is not None:
        styles.append(f"--g:{gate['mean']:.3f}")
        mean, low, high = (written(value, 2) for value in (gate["mean"], gate["lowest"], gate["highest"]))
        shown.append(tag("span", mean, class_="gate"))
        told += f" Gate {mean}." if low == high else f" Gate {mean} on average, from {low} to {high} by dimension."
    classes = [*_step(step, found).values(), *(["stopped"] if row.get("stopped") == step else [])]
    if "stopped" in classes:
        told += " In use the token stops here."
    return tag("td", *shown, style=";".join(styles), data_told=told, **({"class_": " ".join(classes)} if classes else {}))


def _share(probability: float) -> str:
    return f"{bare_per_cent(probability, 0)} %"


def _controls(found: Refining, steps: int, start: int, only_masks: bool) -> Html:
    unit, trained = found["unit"], found["trained"]
    name = f"refining-{next(_numbers)}"
    slider = Html(f'<input type="range" max="{steps}" value="{start}" id="{name}" data-trained="{trained}">')
    parts: list[object] = [
        tag("label", f"Read after {unit}", for_=name),
        slider,
        tag("output", start, for_=name),
        tag("label", Html(f'<input type="checkbox" class="only-masked"{" checked" * only_masks}>'), "only masks"),
    ]
    if any("gate" in cell for cell in found["rows"][0]["cells"]):
        parts.append(tag("label", Html('<input type="checkbox" class="show-gates">'), "gates"))
    return tag("div", *parts, class_="controls")


def _reading(found: Refining, step: int) -> list[Html]:
    """The text with each mask's best prediction after this step; where tokens halt, tinted by when."""
    parts = []
    for row in found["rows"]:
        piece = row["token"].startswith("##")
        if row["masked"]:
            best = row["cells"][step]["top"][0]
            word = tag("mark", best["token"], style=f"--p:{best['probability']:.3f}")
        else:
            word = html(row["token"].removeprefix("##"))
        if "stopped" in row:  # around a mark, whose own colour says how sure the head is
            stop = row["stopped"]
            word = tag("span", word, title=f"stops after {found['unit']} {stop}", **_tint(stop, found))
        parts.append(word)
        if not piece and len(parts) > 1:
            parts.insert(-1, Html(" "))
    return parts


def _legend(found: Refining) -> list[Html]:
    stops = sorted({row["stopped"] for row in found["rows"] if "stopped" in row})
    if not stops:
        return []
    swatches = [part for stop in stops for part in (Html(" "), tag("span", stop, **_tint(stop, found)))]
    return [tag("p", f"In use a token stops after {found['unit']}", *swatches, class_="note stops")]


def _tint(stop: int, found: Refining) -> dict[str, str]:
    """The later, the stronger."""
    last = max(row.get("stopped", 0) for row in found["rows"])
    return {"class_": "stop", "style": f"--s:{stop / max(last, 1):.3f}"}
