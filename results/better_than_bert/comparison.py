"""The runs of the comparison and what follows from them: who is ahead, after which budget, at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pnn.config import RunConfig, load_config
from pnn.models.flops import training_flops
from pnn.models.sections import model_config
from pnn.runs import read_config, read_json, read_metrics
from pnn.stats import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Estimate, seeds_and_sequences, student, verdict

TOTALS = "by_sequence.json"  # in measured/: what every run of (a) and (b) got right in each sequence
TEXT = "wikitext_tokens"
OURS = "pnn_rewrite"
BOX = OURS  # the form of the weights in models/pnn-base
# For the second form: who is tried after one epoch, and how many of them go on (rule 10); then what is added to it (rule 13)
CANDIDATES, GO_ON = ("pnn_thrice", "pnn_wide", "pnn_twelve"), 2
ADDED = "pnn_again"
FORMS = (*CANDIDATES, ADDED)
NAMES = {
    OURS: "PNN-rewrite",
    "pnn_gateless": "PNN-rewrite without its gate",
    "bert4": "BERT-4",
    "bert12": "BERT-12",
    "pnn_paper": "the paper's PNN",
    "pnn_thrice": "PNN-rewrite, seven refiners",
    "pnn_wide": "PNN-rewrite, eight refiners, one attention",
    "pnn_twelve": "PNN-rewrite, twelve refiners, one attention",
    "pnn_again": "PNN-rewrite, with recall and a guess",
    "bert12_again": "BERT-12, with recall and a guess",
}
NAMES |= {f"{form}_gateless": f"{NAMES[form]}, without gates" for form in FORMS}
SEEDS = {OURS: 5, "bert4": 5, "pnn_gateless": 3, "bert12": 3, "pnn_paper": 1}  # of (a)
SEEDS_OF_CONTROL = {"bert12_again": 3}  # BERT-12 with what rule 13 adds, where the form that is compared has it
SEEDS_OF_SECOND = (5, 3)  # with its gates, and without
SEEDS_BESIDE_SECOND = {OURS: 3, "pnn_gateless": 0}  # what the first form needs once there is a second
RIVALS = ("bert12", "bert4", "bert12_again", "gateless")  # the last: the same form without its gates
OF_FORM = {"base": OURS, "rotary": OURS}  # looks at the form that is compared, with either kind of positions
LEAST_SEEDS = 3  # for a verdict
MAY_TRAIL = 0.5  # points that PNN may be behind BERT-12 at (b)
OUTCOMES = {SUPPORTED: "won", NOT_SUPPORTED: "lost", UNDECIDED: "undecided"}
# Of the 1M lines of Wikipedia that all runs read, the older ones too: tokens of a line, and how many one of them attends to
MEAN_LENGTH, ATTENDED = 78.7, 100.5


@dataclass(frozen=True)
class Run:
    """One finished run, in the folder PART/ARM/seed-N."""

    folder: Path

    @property
    def key(self) -> str:
        return "/".join(self.folder.parts[-3:])

    @property
    def part(self) -> str:
        return self.folder.parts[-3]

    @property
    def arm(self) -> str:
        return self.folder.parts[-2]

    @property
    def seed(self) -> int:
        return int(self.folder.name.removeprefix("seed-"))

    @property
    def stage(self) -> str:
        """looks, a, b, box, or rates: any other part is a single epoch of one model."""
        named = self.part.rstrip("0123456789")
        return named if named in ("looks", "a", "b", "box") else "rates"

    @property
    def model(self) -> str:
        """Of a sweep over rates, the part is named after it."""
        named = self.part.removeprefix("rates_") if self.stage == "rates" else OF_FORM.get(self.arm, self.arm)
        return max((model for model in NAMES if named.startswith(model)), key=len, default=named)

    @property
    def positions(self) -> str:
        return str(self.config.model.get("positions", "learned"))

    @cached_property
    def config(self) -> RunConfig:
        return read_config(self.folder)

    @property
    def rate(self) -> float:
        return self.config.training.learning_rate

    @cached_property
    def evaluation(self) -> Any:
        return read_json(self.folder / "evaluation.json")

    @cached_property
    def environment(self) -> Any:
        return read_json(self.folder / "environment.json")

    @property
    def tail(self) -> float:
        """Accuracy on the held-out tail of the training text, which alone chooses forms and rates."""
        return float(self.evaluation["accuracy"])

    @property
    def tokens(self) -> float:
        read = read_json(self.folder / "tokens.json")["train"]
        updates = max(row["step"] for row in read_metrics(self.folder / "metrics.jsonl"))
        return float(updates * self.config.training.effective_batch_size * read["tokens"] / read["sequences"])

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.config)


def flops_per_token(config: RunConfig) -> float:
    """Of training."""
    masked = config.data.masked_in_training * (1 - 2 / MEAN_LENGTH)  # [CLS] and [SEP] are never masked
    return training_flops(model_config(config.model), ATTENDED, masked)


@cache
def flops_of(model: str) -> float:
    """Of a model of the rules, by its config."""
    return flops_per_token(load_config(str(Path(__file__).parent / "configs" / f"{model}.yaml"), []))


def finished(folder: Path) -> list[Run]:
    return [Run(path.parent) for path in sorted(folder.glob("*/*/seed-*/evaluation.json"))]


def at_stage(runs: list[Run], stage: str) -> dict[str, dict[int, Run]]:
    """By model and seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run.stage == stage:
            found.setdefault(run.model, {})[run.seed] = run
    return found


def chosen_form(runs: list[Run]) -> str | None:
    """After three epochs, on the tail: the best of the candidates that went on and of what was added, or PNN-rewrite if none is
    ahead of it; the earlier one where two are level. None until both candidates were trained."""
    three = at_stage(runs, "a")
    tried = [model for model in (OURS, *FORMS) if 0 in three.get(model, {})]
    return max(tried, key=lambda model: three[model][0].tail) if len(set(tried) & set(CANDIDATES)) >= GO_ON else None


def without_gates(form: str) -> str:
    return "pnn_gateless" if form == OURS else f"{form}_gateless"


# What follows ---------------------------------------------------------------------------------------------------------


def right(runs: list[Run]) -> tuple[Any, Any]:
    """(runs, sequences) tokens got right, and (sequences,) those asked for."""
    totals = read_json(runs[0].folder.parents[2] / TOTALS)
    return np.array([totals["correct"][run.key] for run in runs], dtype=float), np.array(totals["targets"], dtype=float)


def ahead(ours: dict[int, Run], theirs: dict[int, Run]) -> dict[str, Any] | None:
    """How many points ours is ahead, paired by the seeds that both have and by sequence; on the tail by seed alone."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    mine, targets = right([ours[seed] for seed in seeds])
    gains = mine - right([theirs[seed] for seed in seeds])[0]
    by_seed = (100 * gains.sum(axis=1) / targets.sum()).tolist()
    drawn = seeds_and_sequences(gains, targets).on_scale(lambda fraction: 100 * fraction)
    outcome = OUTCOMES[verdict(drawn)] if len(seeds) >= LEAST_SEEDS else "too few seeds"
    return {
        "mean": drawn.value,
        "low": drawn.low,
        "high": drawn.high,
        "student": student(by_seed).as_json(),
        "by_seed": by_seed,
        "tail": student([100 * (ours[seed].tail - theirs[seed].tail) for seed in seeds]).as_json(),
        "seeds": seeds,
        "verdict": outcome,
    }


def budget_of(runs: dict[int, Run], speeds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One model after one budget: what it reached and what that took."""
    seeds = sorted(runs)
    one = runs[seeds[0]]
    if one.stage in ("rates", "looks"):
        text = one.evaluation["sets"][TEXT]
        reached = Estimate(text["accuracy"], *text["accuracy_interval"])
    else:
        reached = seeds_and_sequences(*right([runs[seed] for seed in seeds]))
    speed = speeds.get(one.model, {}).get("train")
    return {
        "accuracy": reached.as_json(),
        "by_seed": [runs[seed].evaluation["sets"][TEXT]["accuracy"] for seed in seeds],
        "tail": float(np.mean([runs[seed].tail for seed in seeds])),
        "seeds": seeds,
        "learning_rate": one.rate,
        "tokens": one.tokens,
        "training_flops": one.tokens * one.flops_per_token,
        "training_minutes": None if speed is None else one.tokens / speed / 60,
    }


def speeds_of(bench: Path) -> dict[str, dict[str, float]]:
    """Tokens per second by config: `train`, `inference`, and `inference after N` of fewer steps than all."""
    found: dict[str, dict[str, float]] = {}
    for row in read_json(bench)["rows"] if bench.exists() else []:
        if "error" not in row and row["implementation"] == "pnn":
            steps = row["name"].partition(", ")[2].partition(" ")[0]
            kind = f"{row['what']} after {steps}" if steps else row["what"]
            found.setdefault(row["config"], {})[kind] = row["tokens_per_second"]["median"]
    return found


def models_of(runs: list[Run], speeds: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    best = {model: {run.seed: run for run in [best_rate(found)]} for model, found in rates_of(runs).items()}
    stages = {"one_epoch": best, **{stage: at_stage(runs, stage) for stage in ("a", "b", "box")}}
    found: dict[str, dict[str, Any]] = {}
    for model in NAMES:
        budgets = {name: budget_of(stage[model], speeds) for name, stage in stages.items() if model in stage}
        if budgets:
            any_run = next(next(iter(stage[model].values())) for stage in stages.values() if model in stage)
            found[model] = {
                "name": NAMES[model],
                "parameters": any_run.evaluation["parameters"],
                "inference_tokens_per_second": speeds.get(model, {}).get("inference"),
                "budgets": budgets,
            }
    return found


def rates_of(runs: list[Run]) -> dict[str, list[Run]]:
    """All single epochs of each model, in the order of their rates."""
    found = {model: [run for run in runs if run.stage in ("rates", "looks") and run.model == model] for model in NAMES}
    return {model: sorted(mine, key=lambda run: run.rate) for model, mine in found.items() if mine}


def rate_word(rate: float) -> str:
    """5e-4 instead of 0.0005."""
    return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")


def positions_of(runs: list[Run]) -> list[str]:
    return sorted({run.positions for run in runs})


def best_rate(found: list[Run]) -> Run:
    return max(found, key=lambda run: run.tail)


def steps_of(runs: list[Run], speeds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """One checkpoint as a dial: accuracy after each step that has a loss against measured speed, and BERT beside it."""
    stage = next((stage for stage in ("b", "a") if BOX in at_stage(runs, stage)), None)
    rows = []
    for model in (BOX, "bert4", "bert12"):
        run = at_stage(runs, stage).get(model, {}).get(0) if stage else None
        if run is None:
            continue
        text, weights = run.evaluation["sets"][TEXT], run.config.model.get("step_weights")
        last = text["num_steps"]
        read = [step for step in range(1, last) if weights and weights[step - 1] > 0] if model == BOX else []
        for step in [*read, last]:
            kind = "inference" if step == last else f"inference after {step}"
            ends = text["accuracy_by_step_interval"][step]
            rows.append(
                {
                    "model": model,
                    "steps": step,
                    "accuracy": {"value": text["accuracy_by_step"][step], "interval": ends},
                    "inference_tokens_per_second": speeds.get(model, {}).get(kind),
                    "run": run.key,
                }
            )
    return rows


def departures_of(runs: list[Run], bench: Path) -> list[str]:
    """What is missing, or otherwise than the rules say. `bench`: what `pnn bench` timed."""
    found = chosen_otherwise(runs)
    three, form = at_stage(runs, "a"), chosen_form(runs)
    asked, ten = dict(SEEDS), [OURS, "bert4", "bert12"]
    if form is None:
        trained = sum(one in three for one in CANDIDATES)
        found.append(f"(a): the second form is not chosen yet: {trained} of {GO_ON} candidates trained")
    elif form != OURS:
        asked |= SEEDS_BESIDE_SECOND | dict(zip((form, without_gates(form)), SEEDS_OF_SECOND, strict=True))
        asked |= SEEDS_OF_CONTROL if form == ADDED else {}
        ten.append(form)
    for model, wanted in ((model, wanted) for model, wanted in asked.items() if wanted):
        missing = sorted(set(range(wanted)) - three.get(model, {}).keys())
        if len(missing) == wanted:
            found.append(f"(a): {NAMES[model]} is missing")
        elif missing:
            found.append(f"(a): {NAMES[model]} lacks {'seed' if len(missing) == 1 else 'seeds'} {', '.join(map(str, missing))}")
    found += [f"(b): {NAMES[model]} is missing" for model in ten if model not in at_stage(runs, "b")]
    for stage in ("rates", "a", "b"):
        found += differing([run for run in runs if run.stage == stage], stage)
    found += timed_otherwise([run for run in runs if run.stage == "a"], bench)
    for model, tried in rates_of(runs).items():
        if model not in (*asked, *three):  # a candidate that went no further
            continue
        rate, rates = best_rate(tried).rate, sorted({run.rate for run in tried})
        if rate in (rates[0], rates[-1]) and model not in FORMS:  # which have one, by rules 10 and 13
            edge = "lowest" if rate == rates[0] else "highest"
            which = "only one tried" if len(rates) == 1 else f"{edge} of the {len(rates)} tried"
            found.append(f"rates: {rate_word(rate)}, the best of {NAMES[model]}, is the {which}")
        for stage in ("a", "b"):
            used = {run.rate for run in at_stage(runs, stage).get(model, {}).values()}
            if used - {rate}:
                others = ", ".join(map(rate_word, sorted(used)))
                found.append(f"({stage}): {NAMES[model]} was trained at {others}, its best is {rate_word(rate)}")
    return found


def chosen_otherwise(runs: list[Run]) -> list[str]:
    """Where candidates went on otherwise than rule 10 says."""
    looked = {model: best_rate(mine).tail for model, mine in rates_of(runs).items() if model in CANDIDATES}
    best = sorted(looked, key=lambda model: -looked[model])[:GO_ON]
    found = [f"rates: {NAMES[model]} is missing" for model in CANDIDATES if model not in looked]
    if len(looked) == len(CANDIDATES):
        gone_on = [model for model in CANDIDATES if model in at_stage(runs, "a") and model not in best]
        found += [f"(a): {NAMES[model]} is not one of the best {GO_ON} of the candidates" for model in gone_on]
    return found


def timed_otherwise(runs: list[Run], bench: Path) -> list[str]:
    """Training minutes are tokens over a speed: that of the code that trained them."""
    if not bench.exists() or not runs:
        return []
    timed, sources = read_json(bench), {code_of(run.environment) for run in runs}
    if code_of(timed) in sources:
        return []
    return [f"speeds: timed with another version of the code ({timed['git']['commit'][:8]}) than any run of (a)"]


def code_of(made: Any) -> str:
    return str(made.get("source_sha256") or made["git"]["commit"])


def differing(runs: list[Run], stage: str) -> list[str]:
    """Settings that should be one for all runs and are not, and code that is not one."""
    found = []
    free = {"training.seed", "training.learning_rate"}
    for section in ("data", "training", "evaluation"):
        settings = [run.config.to_dict()[section] for run in runs]
        for key in settings[0] if settings else ():
            if f"{section}.{key}" not in free and any(one[key] != settings[0][key] for one in settings):
                found.append(f"({stage}): {section}.{key} is not the same for all runs")
    codes = sorted(
        {run.environment["git"]["commit"][:8] + (" with changes" if run.environment["git"]["changed"] else "") for run in runs}
    )
    if (versions := len({code_of(run.environment) for run in runs})) > 1:
        found.append(f"({stage}): the runs were made by {versions} versions of the code ({', '.join(codes)})")
    return found


def box_of(runs: list[Run], printed: Path) -> dict[str, Any]:
    """Metrics of the model in the box, which is the longest run of its form; and what `pnn evaluate … --json` printed of the
    folder itself, whose weights are rounded to bf16."""
    found: dict[str, Any] = {}
    run = next((mine[0] for stage in ("box", "b") if 0 in (mine := at_stage(runs, stage).get(BOX, {}))), None)
    if run is not None:
        found["box_wikitext_valid"] = float(run.evaluation["sets"][TEXT]["accuracy"])
    if printed.exists():
        one = next(iter(read_json(printed)["sets"].values()))
        found["box_rounded"] = {"value": one["accuracy"], "interval": one["accuracy_interval"], "mask_draws": one["mask_draws"]}
    return found


def gaps_of(runs: list[Run], form: str, stage: str) -> dict[str, dict[str, Any]]:
    """How far a form is ahead of each rival, as far as both were trained. At (b), which has one seed, by another verdict."""
    at = at_stage(runs, stage)
    found = {
        rival: ahead(at.get(form, {}), at.get(without_gates(form) if rival == "gateless" else rival, {})) for rival in RIVALS
    }
    gaps = {rival: gap for rival, gap in found.items() if gap is not None}
    for rival, gap in gaps.items():
        if stage == "b":
            level = "held" if gap["mean"] >= -MAY_TRAIL else "lost"
            gap["verdict"] = f"{level}: at most {MAY_TRAIL} points behind was asked for" if rival == "bert12" else "one seed"
    return gaps


def metrics_of(runs: list[Run], speeds: dict[str, dict[str, float]], box: dict[str, Any]) -> dict[str, Any]:
    headline = chosen_form(runs) or OURS
    metrics: dict[str, Any] = {"form": headline}
    metrics |= {f"points_ahead_of_{rival}": gap for rival, gap in gaps_of(runs, headline, "a").items()}
    metrics["points_ahead_at_b"] = gaps_of(runs, headline, "b")
    if headline != OURS:
        metrics["first_form"] = {"a": gaps_of(runs, OURS, "a"), "b": gaps_of(runs, OURS, "b")}
    metrics |= box
    metrics["models"] = models_of(runs, speeds)
    models = metrics["models"]
    if headline in models and "bert12" in models:
        metrics["parameters_of_bert12"] = models[headline]["parameters"] / models["bert12"]["parameters"]
    metrics["rates"] = {
        model: {kind: {rate_word(run.rate): run.tail for run in mine if run.positions == kind} for kind in positions_of(mine)}
        for model, mine in rates_of(runs).items()
    }
    metrics["looks"] = {run.arm: run.tail for run in runs if run.stage == "looks"}
    metrics["steps"] = steps_of(runs, speeds)
    return metrics
