"""What is lost right after pruning heads and neurons, by score and budget, and what repair brings back; and what is lost by
other ways to prune, then and after learning; and what growing heads brings back. Reads result.json's metrics of one model."""

from __future__ import annotations

from matplotlib.figure import Figure

from pnn.figures.marks import AMBER, BLUE, CONTROL, GREEN, ORANGE, PINK, SKY, estimates
from pnn.figures.style import INK, WIDTH, styled
from pnn.results import Json

COLOURS = {
    "fisher, shared": PINK,
    "fisher, rounds": INK,
    "gradient, shared": BLUE,
    "gradient, even": SKY,
    "surgeon, even": GREEN,
    "wanda, even": AMBER,
    "magnitude, even": ORANGE,
    "random, even": CONTROL,
}


@styled
def scores_and_repair(found: Json) -> Figure:
    """Left: as cut; right: repaired. Nats per token above the unpruned model, one line per score, whiskers over rows."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, kind, title in ((left, "pruned", "right after pruning"), (right, "repaired", "repaired in closed form")):
        for arm, rows in found["arms"].items():
            x = [100 * row["fewer_parameters"] for row in rows]
            y, reach = estimates([row[kind] for row in rows])
            axes.errorbar(x, y, reach, color=COLOURS[arm], marker="o", markersize=4, linewidth=1.5, label=arm)
        axes.set_title(title)
        axes.set_xlabel("per cent fewer parameters")
        axes.set_ylim(bottom=0)
    left.set_ylabel("nats per token above unpruned")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@styled
def smaller_models(models: Json) -> Figure:
    """Perplexity above the control, in per cent, by how many parameters went; whiskers over seeds and rows. `models`: the
    metrics of result.json."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    curves = {
        f"{model}{more}": [row for name, row in found.items() if name.endswith(more) and name.removesuffix(more).isdigit()]
        for model, found in models.items()
        for more in ("", ", tokens too")
    }
    drawn = {label: sorted(rows, key=lambda row: row["fewer_parameters"]) for label, rows in curves.items() if rows}
    for colour, (label, rows) in zip((BLUE, ORANGE, GREEN, PINK), drawn.items(), strict=False):
        gaps = [row["perplexity_above_control"] for row in rows]
        whiskers = [[100 * (gap["mean"] - gap["low"]) for gap in gaps], [100 * (gap["high"] - gap["mean"]) for gap in gaps]]
        x, y = [100 * row["fewer_parameters"] for row in rows], [100 * gap["mean"] for gap in gaps]
        axes.errorbar(x, y, yerr=whiskers, color=colour, marker="o", markersize=4, linewidth=1.5, label=label)
    axes.axhline(0, color=CONTROL, linewidth=1)
    axes.axhline(5, color=CONTROL, linewidth=1, linestyle=":")
    axes.set_xlabel("per cent fewer parameters")
    axes.set_ylabel("perplexity above the control, per cent")
    axes.legend(loc="upper left")
    return figure


BY_ARM = {
    "ours": PINK,
    "ours_unrepaired": AMBER,
    "ours_surgeon": ORANGE,
    "ours_width": CONTROL,
    "llm_pruner": BLUE,
    "tp_width": GREEN,
    "tp_taylor": SKY,
}
WHEN = {"pruned": "right after\npruning", "text": "text\nlearnt", "teacher": "with the\nteacher", "lora": "LoRA,\ntext"}


@styled
def beside_peers(found: Json, called: dict[str, str]) -> Figure:
    """Nats per token above the unpruned model by stage, a mark with whiskers for each way to prune, side by side."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    arms = found["arms"]
    for place, (arm, row) in enumerate(arms.items()):
        stages = [stage for stage in WHEN if stage in row["above_unpruned"]]
        x = [list(WHEN).index(stage) + 0.12 * (place - (len(arms) - 1) / 2) for stage in stages]
        y, reach = estimates([row["above_unpruned"][stage] for stage in stages])
        axes.errorbar(x, y, reach, color=BY_ARM[arm], marker="o", markersize=5, linestyle="none", label=called[arm])
    axes.set_xticks(range(len(WHEN)), list(WHEN.values()))
    axes.set_xlim(-0.5, len(WHEN) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nats per token above unpruned")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@styled
def grown_arms(found: Json) -> Figure:
    """Nats per token that each way to grow ends below growing nothing; whiskers over seeds. Controls are grey."""
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    starts = found["starts"]
    some = [(label, one, BLUE if start == "zero" else PINK) for start in starts for label, one in starts[start]["some"].items()]
    controls = [(f"all, {start}", starts[start]["control"], CONTROL) for start in starts if starts[start]["control"]]
    marks = [*controls, *some]
    for place, (_, one, colour) in enumerate(marks):
        values, reach = estimates([one["gain"]])
        axes.errorbar(values, [-place], xerr=reach, color=colour, marker="o", markersize=5)
    axes.axvline(0, color=CONTROL, linewidth=1)
    axes.set_yticks([-place for place in range(len(marks))], [label for label, _, _ in marks])
    axes.set_xlabel("nats per token below growing nothing")
    return figure
