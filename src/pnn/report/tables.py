"""The tables of results."""

from __future__ import annotations

from collections.abc import Sequence

from pnn.numbers import INTERVAL, bare_per_cent, count, per_cent, per_cent_interval
from pnn.report.loading import MaskedRun
from pnn.report.markup import Html, cell, join, tag
from pnn.report.markup import table as html_table
from pnn.report.verdict import text_name, unknown_beside
from pnn.results import MaskedText, same_targets


def results_table(runs: Sequence[MaskedRun]) -> Html:
    """A row a run. A column that no run can fill is left out."""
    columns: dict[str, list[object]] = {
        "parameters": [count(run.evaluation["parameters"]) for run in runs],
        "accuracy": [tag("b", per_cent(run.evaluation["accuracy"])) for run in runs],
        INTERVAL: [per_cent_interval(run.evaluation["accuracy_interval"]) for run in runs],
        "best possible": [per_cent(run.evaluation["ceiling"]) if "ceiling" in run.evaluation else "" for run in runs],
        "loss": [f"{run.evaluation['loss']:.3f}" for run in runs],
        "updates": [count(run.updates) for run in runs],
        "training tokens/s": [count(run.tokens_per_second) if run.tokens_per_second else "" for run in runs],
        "training minutes": [f"{run.seconds / 60:.1f}" if run.seconds is not None else "" for run in runs],
    }
    filled = {heading: cells for heading, cells in columns.items() if any(cells)}
    rows = [
        [join([run.name, tag("small", run.describe())]), *(cells[index] for cells in filled.values())]
        for index, run in enumerate(runs)
    ]
    return html_table(["run", *filled], rows)


def steps_table(runs: Sequence[MaskedRun]) -> Html:
    """Accuracy and loss after every step, a row per step. Grey where nobody trained the head to read: a BERT baseline's
    inner layers, and a PNN's steps of weight 0."""
    most = max(run.evaluation["num_steps"] for run in runs)
    rows: list[list[object]] = [["0 (embeddings)" if step == 0 else step] for step in range(most + 1)]
    for run in runs:
        for step, row in enumerate(rows):
            row.append(_step_cell(run, step) if step <= run.evaluation["num_steps"] else "")
    return html_table(["after step or layer", *(run.name for run in runs)], rows)


def _step_cell(run: MaskedRun, step: int) -> Html:
    measured = run.evaluation
    accuracy = per_cent(measured["accuracy_by_step"][step])
    interval = per_cent_interval(measured["accuracy_by_step_interval"][step])
    beside = tag("small", f"{interval}, loss {measured['loss_by_step'][step]:.3f}")
    if run.trained_to_be_read(step):
        return cell(join([tag("b", accuracy), beside]))
    return cell(join([accuracy, beside]), class_="quiet")


def kinds_tables(runs: Sequence[MaskedRun]) -> Html:
    """A row a kind of word. Runs that were measured on the same masks share a table, others get their own."""
    groups: list[list[MaskedRun]] = []
    for run in runs:
        group = next((g for g in groups if same_targets([g[0].evaluation, run.evaluation])), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return join(_kinds_table(group) for group in groups)


def _kinds_table(runs: Sequence[MaskedRun]) -> Html:
    kinds = runs[0].evaluation["by_kind"]
    heads = ["kind of word", "share of targets", "best possible"]
    for run in runs:
        last = f"step {run.evaluation['num_steps']}" if run.is_refiner else "last layer"
        heads += [f"{run.name}, step 1", f"{run.name}, {last}"] if _has_first(run) else [f"{run.name}, {last}"]
    rows = []
    for kind, general in kinds.items():
        row: list[object] = [kind, per_cent(general["share"]), per_cent(general["ceiling"])]
        for run in runs:
            part = run.evaluation["by_kind"][kind]
            if _has_first(run):
                row.append(per_cent(part["accuracy_by_step"][1]))
            interval = tag("small", per_cent_interval(part["accuracy_interval"]))
            row.append(join([tag("b", per_cent(part["accuracy"])), interval]))
        rows.append(row)
    return html_table(heads, rows)


def _has_first(run: MaskedRun) -> bool:
    return run.is_refiner and run.evaluation["num_steps"] > 1


def sets_table(runs: Sequence[MaskedRun]) -> Html:
    """Further evaluation sets: a row a set and run."""
    names = dict.fromkeys(name for run in runs for name in run.evaluation.get("sets", {}))
    found = [(name, run, run.evaluation.get("sets", {}).get(name)) for name in names for run in runs]
    results = [(name, run, measured) for name, run, measured in found if measured is not None]
    heads = ["set", "run", "after each step, %", "accuracy", INTERVAL, "loss"]
    rows = [[_set_name(name, measured), run.name, *_set_cells(run, measured)] for name, run, measured in results]
    if any("ceiling" in measured for _, _, measured in results):
        heads.append("best possible")
        for row, (_, _, measured) in zip(rows, results, strict=True):
            row.append(per_cent(measured["ceiling"]) if "ceiling" in measured else "")
    return html_table(heads, rows)


def _set_name(name: str, measured: MaskedText) -> Html:
    about = f"{text_name(measured['source'])}, {count(measured['targets'])} masked tokens"
    return join([name, tag("small", about + unknown_beside(measured))])


def _set_cells(run: MaskedRun, measured: MaskedText) -> list[object]:
    shown = measured["accuracy_by_step"] if run.is_refiner else measured["accuracy_by_step"][-1:]
    return [
        " · ".join(bare_per_cent(accuracy) for accuracy in shown),
        tag("b", per_cent(measured["accuracy"])),
        per_cent_interval(measured["accuracy_interval"]),
        f"{measured['loss']:.3f}",
    ]
