"""Results as tables on a terminal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pnn.evaluation.fill import Filled
from pnn.kinds import of_result
from pnn.numbers import bare_per_cent, count, estimate, halting, interval, per_cent, short_count, unknown_tokens, words_unknown
from pnn.progress import say
from pnn.results import Comparison, CycleRecord, EstimateJson, Evaluation, Json, Prediction, Tasks, TaskScore, texts_of

FILE_COLUMNS = 160
MOST_STEPS = 16  # columns of a table; of more steps, some are shown


def show(*what: Any) -> None:
    """On a terminal as wide as that; into a file or a pipe, where nobody can widen anything, as wide as it needs."""
    console = Console(markup=False)  # names and texts are people's own, brackets and all
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, FILE_COLUMNS)
    console.print(*what)


def print_evaluation(results: dict[str, Evaluation]) -> None:
    """One row per run and text: accuracy after each refinement step, the last with its interval, all in per cent. A BERT
    baseline has no steps to show: its head is trained on the last layer alone. Decoders have a table of their own."""
    note_unknown(results)
    decoders = {name: result for name, result in results.items() if of_result(result).causal}
    if decoders:
        print_perplexity(decoders)
    results = {name: result for name, result in results.items() if name not in decoders}
    if not results:
        return
    rows = []
    for name, result in results.items():
        for label, one in _texts(result):
            steps = one["accuracy_by_step"][:-1] if of_result(result).has_steps else []
            rows.append((f"{name}: {label}" if len(results) > 1 else label, steps, one))
    most = max(len(steps) for _, steps, _ in rows)
    shown = [step for step in range(most) if most <= MOST_STEPS or step & (step - 1) == 0]  # of many: 0, 1, 2, 4, 8 …
    ceilings = any("ceiling" in one for _, _, one in rows)
    table = Table(title=f"accuracy{' after each refinement step' * (most > 0)}, per cent", title_justify="left")
    table.add_column("text", no_wrap=True)
    for column in (*map(str, shown), "end", "95 % interval", *(["best possible"] if ceilings else [])):
        table.add_column(column, justify="right")
    for label, steps, one in rows:
        cells = [bare_per_cent(steps[step]) if step < len(steps) else "" for step in shown]
        cells += [bare_per_cent(one["accuracy"]), interval(one["accuracy_interval"])]
        cells += [bare_per_cent(one["ceiling"])] if "ceiling" in one else []
        table.add_row(label, *cells)
    show(table)
    for name, result in results.items():
        one = _texts(result)[0][1]
        if halt := one.get("halt"):
            every = f"--num-steps {one['num_steps']} measures every step of each"
            print(f"{f'{name}: ' * (len(results) > 1)}tokens halt {halting(halt)}; {every}")


def note_unknown(results: Mapping[str, Evaluation]) -> None:
    """Of every text once that a tokenizer cannot express."""
    texts = (text for result in results.values() for text in texts_of(result).items())
    named = ((one["source"] if name == "validation" else name, one.get("unknown_tokens", 0.0)) for name, one in texts)
    for note in dict.fromkeys(unknown_tokens(share, name) for name, share in named):
        if note is not None:
            say(f"note: {note}")


def _texts(result: Evaluation) -> list[tuple[str, Any]]:
    """Every text by its name; then the same of the averaged weights, where the run kept any."""
    averaged = texts_of(result["average"]) if "average" in result else {}
    return [*texts_of(result).items(), *((f"{label}, averaged weights", one) for label, one in averaged.items())]


def print_perplexity(results: dict[str, Evaluation]) -> None:
    """One row per decoder and text."""
    protocol = next(iter(texts_of(next(iter(results.values()))).values()))
    title = f"windows of {protocol['context']:,} tokens, {protocol['stride']:,} scored"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("text", overflow="fold")
    for column in ("loss", "95 % interval", "perplexity\nby token", "by word", "bits per\nbyte", "accuracy\nper cent"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        for label, one in _texts(result):
            table.add_row(
                f"{name}: {label}" if len(results) > 1 else label,
                f"{one['loss']:.4f}",
                interval(one["loss_interval"], 4, scale=1),
                f"{one['perplexity']:,.2f}",
                f"{one['word_perplexity']:,.1f}" if "word_perplexity" in one else "",
                f"{one['bits_per_byte']:.3f}" if "bits_per_byte" in one else "",
                bare_per_cent(one["accuracy"]),
            )
    show(table)
    for name, result in results.items():
        for label, one in _texts(result):
            if "loss_by_step" in one:
                steps = " → ".join(f"{loss:.3f}" for loss in one["loss_by_step"])
                show(f"{f'{name}: ' * (len(results) > 1)}{label}, loss after each refinement step, from 0: {steps}")


def print_tasks(result: Tasks) -> None:
    """A row per task, a column per number of examples: accuracy and its standard error in per cent; below, the protocol."""
    by_shots = list(result["shots"].values())
    table = Table(title="accuracy ± standard error, per cent", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True)
    table.add_column("metric")
    table.add_column("documents", justify="right")
    for one in by_shots:
        table.add_column(f"{one['shots']}-shot", justify="right")

    def cell(row: TaskScore) -> str:
        error = row["standard_error"]
        return bare_per_cent(row["accuracy"]) + ("" if error is None else f" ± {bare_per_cent(error)}")

    for name, row in by_shots[0]["tasks"].items():
        table.add_row(name, row["metric"], f"{row['documents']:,}", *(cell(one["tasks"][name]) for one in by_shots))
    table.add_section()
    table.add_row("average", "", "", *(cell(one["average"]) for one in by_shots))
    show(table)
    for one in by_shots:
        print(one["protocol"])


def print_comparison(result: Comparison) -> None:
    """A row per run, with its difference to the first; below, the same in words, and what to keep in mind."""
    decoders = "stride" in result
    title = Text(f"{result['sequences']:,} sequences of {result['source']}; accuracy in per cent", style="table.title")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # room for names
    table.add_column("run", overflow="fold")
    own = ("perplexity\nby token", "bits per\nbyte", "accuracy", "loss") if decoders else ("steps", "accuracy", "loss")
    for column in ("para-\nmeters", *own, "difference\nin loss" if decoders else "difference\nto the first", "does it\nhold?"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = result["against_first"]["rows"]
    for run, row in zip(result["runs"], [None, *rows], strict=True):
        apart = ("", "")
        if row is not None and decoders:
            found = row["loss"]
            apart = f"{found['difference']:.4f}\n({interval(found['interval'], 4, scale=1)})", found["verdict"]
        elif row is not None:
            found = row["accuracy"]
            apart = f"{bare_per_cent(found['difference'])}\n({interval(found['interval'])})", found["verdict"]
        more = ["" if run["steps"] is None else str(run["steps"])]
        if decoders:
            more = [f"{run['perplexity']:,.2f}", f"{run['bits_per_byte']:.3f}" if "bits_per_byte" in run else ""]
        table.add_row(
            Text(run["name"]),
            short_count(run["parameters"]),
            *more,
            f"{bare_per_cent(run['accuracy'])}\n({interval(run['accuracy_interval'])})",
            f"{run['loss']:.4f}" if decoders else f"{run['loss']:.3f}",
            *apart,
        )
    show(table)
    for row in rows:
        print(row["sentence"])
    several = f"{len(rows)} differences at once: all intervals are right together in 95 % of cases"
    print(f"\n{several if len(rows) > 1 else '95 % interval'}, over sequences; between seeds runs differ besides.")
    for note in result["notes"]:
        print(note)


def print_filled(filled: Filled, unit: str, read: Collection[int]) -> None:
    """A text and, for each of its masks, the best predictions with their probability in per cent; above them, where asked for,
    the best after each step (or layer: `unit`), bold where it is not that of the step before, grey where the head was not
    trained to `read` it."""
    masks = range(len(filled["predictions"]))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for mask in masks:
        table.add_column("prediction" if len(masks) == 1 else f"mask {mask + 1}", no_wrap=True)
        table.add_column("%", justify="right")

    def add_row(label: str, row: list[Prediction], changed: list[bool], style: str = "") -> None:
        cells = [
            Text(cell, style="bold" if new else style)
            for one, new in zip(row, changed, strict=True)
            for cell in (one["token"], bare_per_cent(one["probability"]))
        ]
        table.add_row(Text(label, style=style), *cells)

    before: list[Prediction] | None = None
    for step, row in enumerate(zip(*filled.get("by_step", []), strict=True)):
        changed = [before is not None and one["token"] != old["token"] for one, old in zip(row, before or row, strict=True)]
        if step in read:
            add_row(f"{unit} {step}", list(row), changed)
        else:
            add_row(f"{unit} {step}", list(row), [False] * len(row), "dim")
        before = list(row)
    table.add_section()
    for rank, row in enumerate(zip(*filled["predictions"], strict=True), 1):
        add_row(f"best {rank}", list(row), [False] * len(row))
    show(Text(filled["text"]), table)
    if any(step not in read for step in range(1, len(filled.get("by_step", [[]])[0]))):
        print(f"grey: {unit}s that were not trained to be read\n")
    if unknown := filled.get("unknown"):
        print(f"{words_unknown(unknown)}\n")


def print_benchmark(result: dict[str, Any]) -> None:
    """One line per row, in real tokens per second with their spread over the blocks; below, the ratios."""
    rate = result["matrix_rate"]
    title = f"real tokens; matrix rate {_flops(rate['flops_per_second']['median'])} ({rate['product']})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("row", no_wrap=True)
    for column in ("tokens/s", "spread", "ms", "MFLOP/\ntoken", "% of\nrate", "GiB"):
        table.add_column(column, justify="right")
    several = len({row["config"] for row in result["rows"]}) > 2  # two are told apart by their architectures
    before = None
    for row in result["rows"]:
        if row["what"] != before:
            if before is not None:
                table.add_section()
            before = row["what"]
            table.add_row(Text(before, style="bold"))
        label = "  " + row["name"] + (f" ({row['config']})" if several else "")
        if "error" in row:
            table.add_row(label, row["error"])
            continue
        speed, share, memory = row["tokens_per_second"], row["share_of_matmul_rate"], row["peak_memory_bytes"]
        table.add_row(
            label,
            f"{speed['median']:,.0f}",
            per_cent((speed["high"] - speed["low"]) / speed["median"]),
            f"{row['milliseconds_per_update']:,.1f}",
            f"{row['flops_per_token'] / 1e6:,.1f}",
            "" if share is None else bare_per_cent(share),
            "" if memory is None else f"{memory / 2**30:.1f}",
        )
    show(table)
    for name, value in result["ratios"].items():
        print(f"{name:32} {value:.3g}")
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['config']}, {row['name']}: {row['error']}; {row['advice']}")


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate > 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"


def print_cycle(summary: dict[str, Any], records: list[CycleRecord]) -> None:
    """A row for every state that the model went through, then what it lost and gained."""
    table = Table(title="held-out text, by token", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("heads", "para-\nmeters", "attention\nparameters", "MFLOP/\ntoken", "loss", "perplexity"):
        table.add_column(column, justify="right")
    labels = {"initial": "before", "measurement": "pruned", "growth": "grown", "final": "learned"}
    for record in records:
        if record["phase"] not in labels:
            continue
        many = summary["cycles"] > 1 and "cycle" in record
        label = f"round {record['cycle']}: {labels[record['phase']]}" if many else labels[record["phase"]]
        table.add_row(
            label,
            str(record["heads"]),
            short_count(record["parameters"]),
            short_count(record["attention_parameters"]),
            f"{record['flops_per_token'] / 1e6:,.2f}",
            f"{record['loss']:.4f}",
            f"{record['perplexity']:,.3f}",
        )
    show(table)
    shares = {what.replace("_", " "): summary[f"fewer_{what}"] for what in CYCLE_SHARES}
    print(", ".join(f"{per_cent(abs(share))} {'fewer' if share >= 0 else 'more'} {what}" for what, share in shares.items()))
    for row in summary["speed"]:
        speed = row["tokens_per_second"]
        print(
            f"reading {row['batch']} × {row['length']} tokens: {speed['initial']:,.0f} → {speed['final']:,.0f} tokens/s "
            f"({speed['final'] / speed['initial']:.2f}×)"
        )


def print_shrunk(summary: dict[str, Any]) -> None:
    """Before, right after pruning, and after learning; then what was measured in time."""
    from pnn.export.changes import speeds_of

    table = Table(title="held-out text, by token", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    called = {"head": "heads", "neuron": "neurons", "layer": "layers", "width": "width", "token": "tokens"}
    kinds = [kind for kind in called if kind in summary["before"]["units"]]
    for column in ("para-\nmeters", *(called[kind] for kind in kinds), "MFLOP/\ntoken", "loss", "perplexity"):
        table.add_column(column, justify="right")
    for stage in ("before", "pruned", "after"):
        found = summary[stage]
        table.add_row(
            "learned" if stage == "after" else stage,
            short_count(found["parameters"]),
            *(count(found["units"][kind]) for kind in kinds),
            f"{found['flops_per_token'] / 1e6:,.2f}",
            f"{found['loss']:.4f}",
            f"{found['perplexity']:,.3f}",
        )
    show(table)
    print(f"{per_cent(summary['fewer_parameters'])} fewer parameters")
    for what, speed in speeds_of(summary).items():
        print(f"{what}: {speed['before']:,.0f} → {speed['after']:,.0f} tokens/s ({speed['after'] / speed['before']:.2f}×)")


CYCLE_SHARES = ("heads", "attention_parameters", "parameters")


def print_head_scores(result: dict[str, Any]) -> None:
    """A row per layer, a column per head; a head that is not there leaves its place empty."""
    end = "highest" if result["highest_go"] else "lowest"
    table = Table(title=f"{result['method']}: the {end} go first", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    width = 1 + max((one["head"] for one in result["scores"]), default=0)
    for head in range(width):
        table.add_column(f"head {head}" if width <= 8 else str(head), justify="right")
    for layer in range(len(result["head_map"])):
        found = {one["head"]: f"{one['score']:.3g}" for one in result["scores"] if one["layer"] == layer}
        table.add_row(str(layer), *(found.get(head, "") for head in range(width)))
    show(table)


def print_study(result: dict[str, Any]) -> None:
    """A row for every finding and model: what was measured, with its interval, and the verdict."""
    table = Table(title="differences paired by seed, 95 % intervals", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("finding", "of", "measured", "verdict"):
        table.add_column(column)
    for name, finding in result["findings"].items():
        table.add_section()
        table.add_row(name, "", finding["claim"], Text(finding["verdict"], style="bold"))
        for of, one in finding.get("by_pair", finding["by_model"]).items():
            table.add_row("", of, _measured(name, one), one["verdict"])
    show(table)


def _measured(finding: str, one: dict[str, Any]) -> str:
    if finding == "F0":
        parts = []
        for ratio, stages in one["by_ratio"].items():
            best = stages["after_learning"]
            parts.append(f"without {per_cent(float(ratio))} of heads, by {best['best']}: {_change(best['rise'])} % perplexity")
        return "; ".join(parts)
    if finding == "F1":
        named = ((name.replace("_", " "), found["more_than_random"]) for name, found in one["by_strategy"].items())
        return "PPL₀/PPL against random: " + "; ".join(f"{name} {_change(more)} points" for name, more in named)
    if finding == "F2":
        return f"updates saved at five times: {_change(one['by_multiplier']['5']['updates_saved'])} %"
    if finding == "F3":
        more, less = _change(one["more_can_go"]), _change(one["regrowth_gains_less"])
        return (
            f"heads that can go, large less small: {more} points; gain by regrowing twice as many, small less large: {less} %"
        )
    lost, cycle = per_cent(one["most_parameters_lost_as_good"]), one["cycle"]
    return (
        f"{lost} of parameters at most; the cycle, {per_cent(cycle['fewer']['heads'])} fewer heads, "
        f"{per_cent(cycle['fewer']['parameters'])} fewer parameters: {_change(cycle['rise'])} % perplexity"
    )


def _change(found: EstimateJson) -> str:
    return estimate(found, 1, scale=100, plus=True)


def print_finetuning(summary: dict[str, Any]) -> None:
    """One row per task; what needs a word more stands below."""
    model = summary["model"]
    title = f"{model['name']} ({model['model_type']}, {short_count(model['parameters'])} parameters), dev sets, per cent"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("task")
    table.add_column("metric", overflow="fold")
    for column in ("score", "95 %\ninterval", "± of\nseeds", "majority", "bag of\nwords", "learning\nrate"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in summary["tasks"].items():
        table.add_row(
            name,
            row["score_is"].removeprefix("dev ").removeprefix("mean of "),
            bare_per_cent(row["score"]),
            interval(row["score_interval"]),
            "" if row["score_std"] is None else f"{bare_per_cent(row['score_std'])} ({row['seeds']})",
            bare_per_cent(row["majority"]),
            bare_per_cent(row["bag_of_words"]),
            f"{row['learning_rate']:g}",
        )
    show(table)
    for name, row in summary["tasks"].items():
        if "score_by_step" in row:
            steps = " → ".join(map(bare_per_cent, row["score_by_step"]))
            trained = "" if row.get("every_step") else ", of which the last alone was trained"
            print(f"{name}, read after refinement steps 0 to {len(row['score_by_step']) - 1}{trained}: {steps}")
        if row["truncated"]:
            print(f"{name}: {row['truncated']:,} texts were cut to the model's length")
        if row["unknown_tokens"] > MANY_UNKNOWN:
            print(f"{name}: {per_cent(row['unknown_tokens'])} of the tokens are not in the model's vocabulary")


MANY_UNKNOWN = 0.05


def print_sweep(result: Json) -> None:
    """One row per arm and text: the mean over seeds, and how far it is from the first arm."""
    table = Table(title="mean over seeds (95 % interval)", title_justify="left")
    for column in ("arm", "parameters", "seeds", "text", "measure"):
        table.add_column(column, no_wrap=column == "arm")
    for column in ("mean", "above the first arm, over seeds", "over seeds and sequences"):
        table.add_column(column, justify="right")
    for arm in result["arms"]:
        for text, found in arm.get("texts", {}).items():
            accuracy = found["measure"] == "accuracy"
            scale, digits = (100, 2) if accuracy else (1, 4)
            apart = found["against_first"] or {}
            cells = [
                "" if one is None else estimate(one, digits, scale=scale, plus=True)
                for one in (apart.get("over_seeds"), apart.get("over_seeds_and_sequences"))
            ]
            about = (short_count(arm["parameters"]), str(len(arm["seeds"])), text, "accuracy, %" if accuracy else "loss, nats")
            table.add_row(arm["name"], *about, estimate(found, digits, scale=scale), *cells)
    show(table)


def print_calibration(run: str, result: Json) -> None:
    """Every setting as it does on the half that checks; then the choice in a sentence."""
    table = Table(title=f"every setting, measured on {result['targets_are']} that did not choose", title_justify="left")
    for name in ("setting", "accuracy, %", "points lost", "95 % interval", "FLOPs", "time"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for row in result["rows"]:
        lost = row["lost"]
        cells = [bare_per_cent(row["accuracy"]), bare_per_cent(lost["value"], 2), interval(lost["interval"], 2)]
        shares = ["" if row[key] is None else per_cent(row[key], 0) for key in ("flops_share", "time_share")]
        table.add_row(row["setting"], *cells, *shares)
    show(table)
    chosen, lost = result["chosen"], result["lost"]
    costs = f"{bare_per_cent(lost['value'], 2)} ({interval(lost['interval'], 2)}) points are lost"
    shares = [per_cent(result[key], 0) for key in ("flops_share", "time_share")]
    print(
        f"{chosen}: {costs} on {count(result['targets']['checked'])} {result['targets_are']} that did not choose, "
        f"for {shares[0]} of the FLOPs and {shares[1]} of the time."
    )
    print(f"Stored in {result['checkpoint']}: {result['users']} use it. Back: pnn calibrate {shlex.quote(run)} --undo")
