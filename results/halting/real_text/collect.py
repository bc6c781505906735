"""From what run.sh measured to measured/, result.json, the figure, the tables of README.md and benchmarks/results.

python results/halting/real_text/collect.py [RUNS]     # RUNS: the folder of run.sh; without it, what is in measured/

Each kind of stopping early has its setting chosen on the tail: the fastest of those that lose at most 0.3 points there, by the
clock of the machine that is told of; each unit for itself. What it costs is told on WikiText, which chose nothing. The dial at
equal accuracy is the fastest mix of two numbers of steps, so many batches with one and the rest with the other, that loses as
little as halting does: a line between the dial's points in accuracy and time.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kept import TEXT
from picture import AIM, CAPTION, FIXED, LOOKS, NAMES, accuracy_against_speed
from timed import FLOPS, Array, Model, counted_in, models_in

from pnn.errors import UserError
from pnn.figures.style import png, save
from pnn.files import write_between, write_json, write_text
from pnn.numbers import count, estimate, per_cent, written
from pnn.results import Json, texts_of
from pnn.runs import check_commit, read_config, read_json
from pnn.stats import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Estimate, middle, resampled_sums, seeds_and_sequences, verdict
from pnn.studies.analyses.halting import FASTER, LOSE

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
BENCHMARKS = HERE.parents[2] / "benchmarks" / "results"
ORACLE, GROUPS = "analysis/halting.json", "groups.json"  # these two may come later, or never
FILES = ("config.yaml", "environment.json", "evaluation.json", "ways.json", "by_sequence.json", ORACLE, GROUPS)
GROUPED = {  # and what stands before a group's name
    "by_kind": "",
    "by_frequency": "ordinary, ",
    "by_kind_of_word": "ordinary, ",
    "by_outcome": "masked, ",
    "by_loss": "masked, ",
}
LEAST_SEEDS = 3  # for a verdict
PLAIN = {"pnn_paper_ready": "pnn_paper", "pnn_rewrite_one_ready": "pnn_rewrite_one"}  # the same, trained as others are
OUTCOMES = {SUPPORTED: "won", NOT_SUPPORTED: "lost", UNDECIDED: "undecided"}
Row = dict[str, Any]


def bound_of(analysis: Json) -> Row:
    """As results/halting tells of an analysed run."""
    spec = importlib.util.spec_from_file_location("collect_bounds", HERE.parent / "collect.py")
    assert spec is not None
    assert spec.loader is not None
    bounds = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bounds)
    found: Row = bounds.metrics(analysis)
    return found


def copy_in(runs: Path) -> None:
    if not any((runs / "home").glob("*/ways.json")):
        raise UserError(f"{runs / 'home'} has nothing that was measured: run.sh measure writes it")
    for home in sorted(path.parent for path in (runs / "home").glob("*/ways.json")):
        check_commit(home)
        target = MEASURED / home.name
        (target / "analysis").mkdir(parents=True, exist_ok=True)
        config = read_config(home)
        places = {
            config.data.train: "TOKENS",
            config.evaluation.sets[TEXT].source: "WIKITEXT",
            config.data.prepared: "prepared",
        }
        sources = [one["source"] for one in texts_of(read_json(home / "evaluation.json")).values()]
        places |= {source: f"DATA/{Path(source).name}" for source in sources}
        for name in (*FILES, *(path.name for path in home.glob("speed-*.json"))):
            if (home / name).exists():
                text = (home / name).read_text(encoding="utf-8")
                for place, word in sorted(places.items(), reverse=True, key=lambda one: len(one[0])):  # one may begin another
                    text = text.replace(place, word) if "/" in place else text
                write_text(target / name, text)


# The dial at equal accuracy ----------------------------------------------------------------------------------------------


def dial_time(lost: Array, dial_lost: Array, times: Array) -> Array:
    """Of the fastest mix of two numbers of steps that loses no more. `lost`: (…,); `dial_lost`: (…, T), what each number of
    steps loses; `times`: (T,), all steps first. Nothing faster than all steps may be as good: then it is all steps."""
    best = np.full(lost.shape, times[0])
    for i, slow in enumerate(times):
        reached = dial_lost[..., i] <= lost
        best = np.where(reached, np.minimum(best, slow), best)
        for j, fast in enumerate(times):
            gap = dial_lost[..., j] - dial_lost[..., i]
            between = reached & (dial_lost[..., j] > lost)
            share = np.where(between, (lost - dial_lost[..., i]) / np.where(gap == 0, 1, gap), 0)
            best = np.where(between, np.minimum(best, slow + share * (fast - slow)), best)
    return best


def against_dial(model: Model, chosen: list[Json], other: Model | None = None, draws: int = 2000) -> Estimate:
    """Time of the dial at the accuracy of these ways over their own, mean over seeds; the middle 95 % where sequences and
    seeds are drawn again. Times stay as they are. `other`: whose dial it is, of a model of the same shape, so
    that its steps take as long."""
    dial = model.family("dial")
    columns = [model.lost(way) for way in (*dial, *chosen)]
    if other is not None:
        behind = np.array(model.by_sequence["right"], float) - np.array(other.by_sequence["right"], float)
        columns[: len(dial)] = [behind + other.lost(way) for way in other.family("dial")]
    totals = np.column_stack((*columns, model.targets))
    times, own = (np.array([model.time(way) for way in ways]) for ways in (dial, chosen))

    def ratio(sums: Array) -> Array:
        shares = sums[..., :-1] / sums[..., -1:]
        dials, ours = shares[..., None, : len(dial)], shares[..., len(dial) :]
        found: Array = dial_time(ours, np.broadcast_to(dials, (*ours.shape, len(dial))), times) / own
        return found

    drawn = ratio(resampled_sums(totals, draws, seed=0))
    which = np.random.default_rng(len(chosen)).integers(0, len(chosen), drawn.shape)
    means = np.take_along_axis(drawn, which, axis=1).mean(axis=1)
    return Estimate(float(ratio(totals.sum(axis=0)).mean()), *middle(means, len(totals)))


# What follows ------------------------------------------------------------------------------------------------------------


def told(model: Model, family: str, plain: Model | None = None) -> Row:
    """One kind of stopping early with its chosen setting, of a unit one for each seed."""
    chosen = [model.chosen(family, seed) for seed in (model.seeds if family == "learned" else [None])]
    by_turn = np.concatenate([model.turns(model.ways[0]) / model.turns(way) for way in chosen])
    row: Row = {
        "chosen": [way["name"] for way in chosen],
        "speed": float(np.mean([model.speed_of(way) for way in chosen])),
        "speed_by_seed": [model.speed_of(way) for way in chosen],
        "speed_by_turn": [float(by_turn.min()), float(by_turn.max())],
        "ideal_speed": float(np.mean([1 / way["flops_share"] for way in chosen])),
        "points_lost": seeds_and_sequences(np.array([model.lost(way) for way in chosen]), model.targets).as_json(),
        "steps": float(np.mean([way["steps"] for way in chosen])),
        "steps_of_masked": float(np.mean([way["steps_of_masked"] for way in chosen])),
    }
    if family != "dial":
        row["against_dial"] = against_dial(model, chosen).as_json()
        if plain is not None:
            row["against_plain_dial"] = against_dial(model, chosen, plain).as_json()
    if family not in FIXED:
        dealt, lost = (np.array([model.lost(way, key) for way in chosen]) for key in ("lost_at_random", "lost"))
        row["random_points_lost"] = seeds_and_sequences(dealt, model.targets).as_json()
        row["ahead_of_random"] = seeds_and_sequences(dealt - lost, model.targets).as_json()
    return row


def metrics_of(model: Model) -> Row:
    plain = model.folder.parent / PLAIN.get(model.folder.name, "none")
    other = Model(plain, {}) if (plain / "ways.json").exists() else None
    found: Row = {"accuracy": model.accuracy, "targets": int(model.targets.sum()), "unit_seeds": model.seeds}
    found["ways"] = {family: told(model, family, other) for family in LOOKS}
    halting = found["ways"]["learned"]
    enough = len(model.seeds) >= LEAST_SEEDS
    outcome = verdict(Estimate.from_json(halting["against_dial"]), 1 + FASTER) if enough else UNDECIDED
    found["verdict"], found["disturbed"] = OUTCOMES[outcome], model.disturbed
    found["aim_reached"] = halting["speed"] >= AIM and halting["points_lost"]["value"] <= LOSE
    if (analysis := model.folder / ORACLE).exists():
        found["oracle"] = bound_of(read_json(analysis))
        ideal = found["oracle"]["ideal_speedup"]["value"]
        found["share_of_oracle"] = {"ideal": halting["ideal_speed"] / ideal, "measured": halting["speed"] / ideal}
    return found


def ratios_of(found: dict[str, Row]) -> dict[str, float]:
    """Of the model that does worse, by the names that every benchmark has; and of each."""
    named = {
        model: {
            "halting_speedup": row["ways"]["learned"]["speed"],
            "halting_vs_dial": row["ways"]["learned"]["against_dial"]["value"],
            "halting_points_lost": 100 * row["ways"]["learned"]["points_lost"]["value"],
        }
        for model, row in found.items()
    }
    worst = {key: (max if "lost" in key else min)(one[key] for one in named.values()) for key in next(iter(named.values()))}
    return worst | {f"{model}_{key}": value for model, one in named.items() for key, value in one.items()}


def table(found: dict[str, dict[str, Row]]) -> str:
    lines = [
        "| machine | model, accuracy | stopping early by | speed (by seed) | points lost (95 %) "
        "| × the dial at equal accuracy (95 %) | × the dial of the model trained as others | ideal speed "
        "| at random, points lost | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for slug, models in found.items():
        for name, row in models.items():
            for family, way in row["ways"].items():
                speeds = way["speed_by_seed"]
                by_seed = f" ({', '.join(written(one, 2) for one in speeds)})" if len(speeds) > 1 else ""
                cells = [
                    slug,
                    f"{NAMES.get(name, name)}, {per_cent(row['accuracy'])}",
                    LOOKS[family][2],
                    f"{written(way['speed'], 2)}×{by_seed}",
                    estimate(way["points_lost"], 2, scale=100),
                    estimate(way["against_dial"], 2) if "against_dial" in way else "",
                    estimate(way["against_plain_dial"], 2) if "against_plain_dial" in way else "",
                    f"{written(way['ideal_speed'], 2)}×",
                    estimate(way["random_points_lost"], 2, scale=100) if "random_points_lost" in way else "",
                    row["verdict"] if family == "learned" else "",
                ]
                lines.append("| " + " | ".join(cells) + " |")
            if "oracle" in row:
                ideal = row["oracle"]["ideal_speedup"]
                cells = [slug, NAMES.get(name, name), "the oracle", "", "0", "", "", f"{estimate(ideal, 2)}", "", ""]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def groups_table(folder: Path) -> str:
    """Mean steps of each group of tokens, by the oracle and by each criterion that loses little enough; of units over seeds."""
    ways = read_json(folder / GROUPS)["ways"]
    oracle = read_json(folder / ORACLE) if (folder / ORACLE).exists() else {}
    families = [family for family in LOOKS if any(way["family"] == family for way in ways)]
    units = sum(way["family"] == "learned" for way in ways)
    heads = [LOOKS[family][2] + f", {units} seed{'s' * (units != 1)}" * (family == "learned") for family in families]
    name = NAMES.get(folder.name, folder.name)
    lines = ["| " + " | ".join([name, "tokens", "oracle", *heads]) + " |", "|---" * (3 + len(families)) + "|"]
    for group, before in GROUPED.items():
        for label, row in (ways[0][group] if ways else {}).items():
            bound = oracle.get(group, {}).get(label)
            cells = [f"{before}{label}", count(row["tokens"]), estimate(bound["steps"], 2) if bound else ""]
            for family in families:
                found = [way[group][label]["steps"] for way in ways if way["family"] == family]
                means = [one["value"] for one in found]
                over = f"{written(np.mean(means), 2)} ({written(min(means), 2)} to {written(max(means), 2)})"
                cells.append(over if family == "learned" else estimate(found[0], 2))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if ways else f"{name}: no criterion loses so little."


def answer(found: dict[str, dict[str, Row]]) -> str:
    said = []
    for slug, models in found.items():
        for name, row in models.items():
            way = row["ways"]["learned"]
            near = f", {per_cent(row['share_of_oracle']['ideal'], 0)} of the oracle's ideal speed" if "oracle" in row else ""
            said.append(
                f"{NAMES.get(name, name)} on {slug}: {written(way['speed'], 2)} times the speed of all steps at "
                f"{estimate(way['points_lost'], 2, scale=100)} points lost, {estimate(way['against_dial'], 2)} times the dial "
                f"at equal accuracy ({row['verdict']}; the aim of {AIM} is {'' if row['aim_reached'] else 'not '}reached){near}"
            )
    return "Tokens that halt by a learned unit: " + "; ".join(said) + "."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    machines = models_in(MEASURED)
    if not machines:
        raise UserError(f"{MEASURED} has nothing that was measured")
    timed = dict(machines)
    machines[FLOPS] = counted_in(MEASURED)
    found = {slug: {name: metrics_of(model) for name, model in models.items()} for slug, models in machines.items()}
    command = "results/halting/real_text/run.sh gpu TOKENS WIKITEXT RUNS; … cpu RUNS; python …/collect.py RUNS"
    first = next(iter(next(iter(machines.values())).values()))
    about = read_json(first.folder / "ways.json")
    write_json(
        HERE / "result.json",
        {
            "question": "On real text, does halting tokens save more time than fewer steps for everyone, at equal accuracy?",
            "protocol": "README.md beside, written before the run: settings chosen on the tail, told on WikiText-103 valid "
            f"({about['texts'][TEXT]['targets']:,} targets, {about['mask_draws']} draws of masks); intervals over seeds of the "
            "unit and sequences; speeds are of prediction from tokens to tokens, all ways in turns, each in its best batches",
            "seeds": first.seeds,
            "hardware": {slug: next(iter(models.values())).speed["hardware"] for slug, models in timed.items()},
            "ratios": {slug: ratios_of(found[slug]) for slug in timed},
            "metrics": found,
            "answer": answer({slug: found[slug] for slug in timed}),
            "command": command,
        },
    )
    for slug, models in timed.items():
        speed = next(iter(models.values())).speed
        known = {key: speed[key] for key in ("hardware", "versions", "git", "source_sha256")}
        rows = [{"model": name, **row} for name, row in found[slug].items()]
        write_json(BENCHMARKS / f"halting-real-text-{slug}.json", known | {"rows": rows, "ratios": ratios_of(found[slug])})
    save(png(accuracy_against_speed(machines, found)), HERE / "figures" / "accuracy_against_speed.png")
    write_between(HERE / "README.md", "table", f"{table(found)}\n\n{CAPTION}\n")
    print(table(found), answer({slug: found[slug] for slug in timed}), sep="\n\n")
    folders = {model.folder for models in machines.values() for model in models.values() if (model.folder / GROUPS).exists()}
    if folders:
        grouped = "\n\n".join(groups_table(folder) for folder in sorted(folders))
        write_between(HERE / "README.md", "groups", grouped)
        print(f"\n{grouped}")


if __name__ == "__main__":
    main()
