"""What still needs a GPU, in the order in which it is wanted: to_measure.py does it.

An item is one command of a few minutes. Minutes of a training are tokens over the measured speed; the others are estimates. Not
here: plastic_training at full size, whose arms are not chosen yet.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "better_than_bert"))
from comparison import (
    ADDED,
    CANDIDATES,
    GO_ON,
    OURS,
    SEEDS,
    SEEDS_BESIDE_SECOND,
    SEEDS_OF_CONTROL,
    SEEDS_OF_SECOND,
    flops_of,
)

from pnn.runs import read_json

HERE = Path(__file__).resolve().parent
BERT = HERE / "better_than_bert"
EPOCH = 78.7e6  # tokens
NOWHERE = "nowhere/measured.json"  # where nothing is collected: what is needed again each time
FAILED = ".failed"  # behind the name of what an item would have left
AROUND = 0.5  # minutes of a training beside its updates, if another computes while it starts and evaluates


@dataclass(frozen=True)
class Item:
    name: str
    minutes: float
    command: str  # with {runs} and {data}
    leaves: str  # a file in RUNS
    kept: str  # a file in results/, once that is collected
    needs: tuple[str, ...]  # in DATA
    after: str = "."  # what must be in RUNS: weights that another item made
    model: str = ""  # that it trains
    seed: int = 0
    alone: bool = False  # nothing else may compute meanwhile: it times

    def done(self, runs: Path | None) -> bool:
        return self.found(runs) is not None or self.failed(runs)

    def failed(self, runs: Path | None) -> bool:
        """It ended with an error, as a training that diverges does, and is not tried again."""
        marks = [HERE / (self.kept + FAILED), *([] if runs is None else [runs / (self.leaves + FAILED)])]
        return any(mark.exists() for mark in marks)

    def found(self, runs: Path | None) -> Path | None:
        """What it left, collected or not."""
        files = [HERE / self.kept, *([] if runs is None else [runs / self.leaves])]
        return next((file for file in files if file.exists()), None)

    def can_start(self, runs: Path, data: Path) -> bool:
        return (runs / self.after).exists() and all((data / name).exists() for name in self.needs)


def items(runs: Path | None) -> Iterator[Item]:
    """All of them, as far as they are known by now."""
    yield from comparison(runs)
    yield from shrink(runs)
    yield from hybrids(runs)
    yield from widths()
    yield from causal(runs)


def best_of(candidates: list[Item], runs: Path | None, wanted: int) -> list[Item]:
    """Those that are right most often on the held-out tail, earlier ones first where they are level. None before all are
    known; what failed is none of the best."""
    if not all(item.done(runs) for item in candidates):
        return []
    tails = {item: read_json(file)["accuracy"] for item in candidates if (file := item.found(runs)) is not None}
    return sorted(tails, key=lambda item: -tails[item])[:wanted]


# The comparison with BERT ---------------------------------------------------------------------------------------------

RATES = {"pnn_gateless": ("1e-3", "4e-3"), "bert12": ("1e-3", "5e-4"), "pnn_paper": ("1e-3", "2e-3", "4e-3")}
OF_BERT12 = "1e-3"  # in its config


def comparison(runs: Path | None) -> Iterator[Item]:
    """First the candidates for the second form, and what rules 10 and 13 make of them. Then BERT-12's last rate, before which
    none of its seeds begins, and three seeds of the two models that the question is about. The rest in turns: what is half done
    compares already."""
    candidates, forms = [one_epoch(model) for model in CANDIDATES], [three_epochs(OURS, 0)]
    yield from candidates
    longer = [three_epochs(item.model, 0) for item in best_of(candidates, runs, wanted=GO_ON)]
    added = three_epochs(ADDED, 0)
    yield from (*longer, added)
    if longer and all(item.done(runs) for item in longer):
        forms += [*longer, *([added] if added.done(runs) else [])]
    second = best_of(forms, runs, wanted=1) if len(forms) > 1 else []
    form = second[0].model if second else OURS
    wanted = dict(SEEDS)
    if form != OURS:
        control = SEEDS_OF_CONTROL if form == ADDED else {}
        wanted = dict(zip((form, f"{form}_gateless"), SEEDS_OF_SECOND, strict=True)) | control | wanted | SEEDS_BESIDE_SECOND
    tried = rates_of("bert12")
    yield from tried.values()
    best = best_of(list(tried.values()), runs, wanted=1)
    rate = next((rate for rate, item in tried.items() if item in best), None)
    turns = [
        three_epochs(model, seed, rate if model == "bert12" else None)
        for seed in range(max(wanted.values()))
        for model, seeds in wanted.items()
        if seed < seeds and (model != "bert12" or rate is not None)
    ]
    asked = [item for item in turns if item.seed < 3 and item.model in (form, "bert12")]
    late = ("pnn_gateless", "pnn_paper", f"{form}_gateless", OURS)
    first = asked + [item for item in turns if item.seed < 3 and item.model not in late and item not in asked]
    yield from first
    looks = (
        ("halfway", "pnn_wide"),
        ("guess", "pnn_wide"),
        ("recalls", "pnn_wide"),
        ("narrow", OURS),
    )  # what each change gives by itself
    for look, of in looks:
        yield training(f"looks, {look}:", of, f"looks/{look}", 0, 1, config=BERT / "configs" / "looks" / f"{look}.yaml")
    if form != OURS:
        yield training("(b)", form, f"b/{form}", 0, 10)
        if form not in speeds():
            timing = f"env FORM={form} bash {BERT}/run.sh speeds {{data}}/tokens {{data}}/wikitext {{runs}}/better_than_bert"
            leaves = "better_than_bert/speeds.json"
            yield Item("speeds", 5.0, timing, leaves, NOWHERE, ("tokens", "wikitext"), alone=True)
    for model in RATES:
        if wanted[model]:
            yield from rates_of(model).values()
    yield from (item for item in turns if item not in first)
    tuning = f"bash {HERE}/downstream/run.sh {{data}} {{runs}}/better_than_bert"
    for model in (OURS, "bert4", "bert12"):
        leaves, kept = f"better_than_bert/{model}.tuned", f"downstream/measured/{model}-glue/sst2/result.json"
        weights = f"better_than_bert/b/{model}/seed-0/checkpoints/best"
        tuned = Item(f"downstream, {model}", 4.0, f"{tuning} {model}", leaves, kept, ("glue", "superglue"), weights)
        if model == OURS:
            yield replace(tuned, after=".")  # models/pnn-base has its weights
            continue
        if model != "bert12" or rate is not None:
            yield training("(b)", model, f"b/{model}", 0, 10, at(rate if model == "bert12" else None))
        yield tuned  # in the same half an hour: weights do not go home


def rates_of(model: str) -> dict[str, Item]:
    part = f"rates_{model}" + ("_rotary" if model == "bert12" else "")
    return {
        rate: training("rates", model, f"{part}/learning_rate={rate}", 0, 1, {"learning_rate": rate}) for rate in RATES[model]
    }


def one_epoch(model: str) -> Item:
    return training("rates", model, f"rates_{model}/learning_rate=2e-3", 0, 1, {"learning_rate": "2e-3"})


def three_epochs(model: str, seed: int, rate: str | None = None) -> Item:
    """What is in a2, at a rate that turned out better, counts instead of what is in a."""
    part = "a2" if at(rate) else "a"
    return training("(a)", model, f"{part}/{model}", seed, 3, at(rate))


def at(rate: str | None) -> dict[str, str]:
    """What is to be set for BERT-12's best rate; nothing for other models, whose configs have theirs."""
    return {} if rate in (None, OF_BERT12) else {"learning_rate": rate}


def training(
    stage: str, model: str, arm: str, seed: int, epochs: int, more: dict[str, str] | None = None, config: Path | None = None
) -> Item:
    """One run by the comparison's recipe: of a model of its own, or of `config`, for the study whose folder that is in."""
    config = BERT / "configs" / f"{model}.yaml" if config is None else config
    study = config.relative_to(HERE).parts[0]
    settings: dict[str, object] = {
        f"training.{key}": value for key, value in {"epochs": epochs, "seed": seed, **(more or {})}.items()
    }
    folder = f"{arm}/seed-{seed}"
    measured = "measured" if study == BERT.name else f"measured/{config.parent.name}"
    return Item(
        f"{stage} {model}, seed {seed}" + "".join(f", {key} {value}" for key, value in (more or {}).items()),
        epochs * EPOCH / speed_of(model) / 60 + AROUND,
        train(config, f"{study}/{folder}", settings),
        f"{study}/{folder}/evaluation.json",
        f"{study}/{measured}/{folder}/evaluation.json",
        ("tokens", "wikitext"),
        model=model,
        seed=seed,
    )


def speed_of(model: str) -> float:
    """Tokens per second, as measured or by FLOPs."""
    if model in STEPS:
        return speeds()[OURS] * STEPS["looped"] / STEPS[model]
    return speeds().get(model) or speeds()["bert12"] * flops_of("bert12") / flops_of(model)


def speeds() -> dict[str, float]:
    rows = read_json(BERT / "measured" / "speeds.json")["rows"]
    return {row["config"]: float(row["tokens_per_second"]["median"]) for row in rows if row["what"] == "train"}


def train(config: Path, folder: str, settings: dict[str, object]) -> str:
    settings = settings | {"data.train": "{data}/tokens", "evaluation.sets.wikitext_tokens.source": "{data}/wikitext"}
    sets = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return f"{sys.executable} -m pnn train {config} --output {{runs}}/{folder} --resume {sets}"


# A smaller SmolLM2 ----------------------------------------------------------------------------------------------------

LEARNS = "--updates 769 --rate 6e-4"  # 25M tokens
PEERS = ("llm_pruner", "tp_width", "tp_taylor")


def shrink(runs: Path | None) -> Iterator[Item]:
    """Looks at how to learn, a fifth fewer parameters, the curve, one seed, and without the teacher; then other pruners."""
    too, not_too = "--kinds token head neuron", "--kinds head neuron"
    arms = [
        ("control", "--shares"),
        ("less-20-tokens-logits", f"--shares 0.2 {too}"),
        ("less-20-logits", f"--shares 0.2 {not_too}"),
    ]
    wanted = [(name, asked, seed) for seed in range(3) for name, asked in arms]
    wanted += [(f"less-{share}-tokens-logits", f"--shares {share / 100:g} {too}", 0) for share in (10, 30, 40, 50)]
    wanted += [("less-20-tokens-none", f"--shares 0.2 --teachers none {too}", 0)]
    # Would pruning in rounds, more and smaller updates, or Muon make more of the same tokens? Looks at 6.3M of them by rows per
    # update, rate, optimiser and rounds, on another part of Wikipedia than the arms are measured on. The recipe of the first is
    # theirs so far.
    alike = f"--shares 0.2 {too} --seeds 0 --batch 64 --rate 6e-4"
    looks = [
        (
            f"less-20-tokens-logits-0-look-{rows}-{rate}-{optimizer}-{rounds}",
            1.7,
            f"{alike} --look {rows} {rate} {optimizer} {rounds} --updates {192 * 64 // rows}",
        )
        for rows, rate, optimizer, rounds in (
            (64, "6e-4", "adamw", 1),
            (64, "6e-4", "adamw", 4),
            (16, "6e-4", "adamw", 4),
            (16, "3e-4", "adamw", 4),
            (64, "1e-3", "muon", 4),
            (16, "6e-4", "muon", 4),
        )
    ]
    left = [(f"{name}-{seed}", 2.5, f"{asked} --seeds {seed} {LEARNS}") for name, asked, seed in wanted]
    others = [
        (f"less-20-{peer}-{seed}", 3.0, f"--shares 0.2 --peers {peer} --seeds {seed} {LEARNS}")
        for seed in range(3)
        for peer in PEERS
    ]
    path = ":".join(["{data}/packages", *filter(None, [os.environ.get("PYTHONPATH")])])
    env = f"env {shlex.quote(f'PYTHONPATH={path}')} {sys.executable} {HERE}/shrink/run.py {{data}}/SmolLM2-135M"
    rest = f"{{runs}}/shrink --score-rows 256 --adapt 300 --train-rows {769 * 64}"
    part, other = "text/part-04.txt.xz", "text/part-03.txt.xz"
    adapted, needs = "shrink/adapted/model.safetensors", ("SmolLM2-135M", part)
    found = []
    for name, minutes, asked in [*looks, *left, *others]:
        more = ("packages/torch_pruning",) if "-tp_" in name else (other,) if "-look-" in name else ()
        about = (f"shrink/measured/{name}.json", f"shrink/measured/smollm2_135m/{name}.json", (*needs, *more), adapted)
        text = other if "-look-" in name else part
        found.append(Item(f"shrink, {name}", minutes, f"{env} {{data}}/{text} {rest} {asked}", *about))
    if not all(item.done(runs) for item in found):  # the model that all of them start from, made anew in every half an hour
        yield Item("shrink, the adapted model", 1.5, f"{env} {{data}}/{part} {rest} {LEARNS} --seeds", adapted, NOWHERE, needs)
    yield from found


# Where distinct weights stand -----------------------------------------------------------------------------------------

# of each arm; one step costs the same in all
STEPS = {"looped": 8, "entering": 8, "leaving": 8, "both_ends": 8, "one": 8, "eight": 8, "four_once": 4, "both_ends_long": 12}


def hybrids(runs: Path | None) -> Iterator[Item]:
    """A look at every arm, then three seeds of the best three. `looped` is PNN-rewrite of the comparison with BERT."""
    looks = [of_hybrids("a look at", arm, "looks", 0, 1) for arm in STEPS if arm != "looped"]
    yield from looks
    looped = Item("looped", 0, "", "none", f"{BERT.name}/measured/looks/rotary/seed-0/evaluation.json", (), model="looped")
    for seed in range(3):
        for item in best_of([looped, *looks], runs, wanted=3):
            if item.model != "looped":
                yield of_hybrids("three epochs of", item.model, "a", seed, 3)


def of_hybrids(stage: str, arm: str, part: str, seed: int, epochs: int) -> Item:
    return training(f"hybrids, {stage}", arm, f"{part}/{arm}", seed, epochs, config=HERE / "hybrids" / "wide" / f"{arm}.yaml")


# Rates that carry over widths -----------------------------------------------------------------------------------------


def widths() -> Iterator[Item]:
    """Ten runs of half an epoch for each optimiser, and five at width 256."""
    collected = HERE / "widths" / "result.json"  # of both sizes
    metrics = read_json(collected)["metrics"] if collected.exists() else {}
    for optimizer in ("muon", "adamw"):
        if optimizer not in metrics.get("w768", {}).get("optimizers", {}):
            command = f"env OPTIMIZERS={optimizer} bash {HERE}/widths/run.sh {{data}}/tokens {{runs}}/widths"
            leaves = f"widths/{optimizer}_w768_plain/sweep.json"
            yield Item(f"widths, {optimizer}", 8.5, command, leaves, NOWHERE, ("tokens",))


# Causal PNNs and loops of Deep Delta blocks ---------------------------------------------------------------------------

FAMILIES = ("additive", "delta", "pnn")
OF_DECODERS = ("1e-3", "2e-3", "4e-3")
WIKIPEDIA = tuple(f"text/part-0{part}.txt.xz" for part in range(5))


def causal(runs: Path | None) -> Iterator[Item]:
    """Rates of each family, then three seeds of every arm at its family's best."""
    best: dict[str, str] = {}
    for family in FAMILIES:
        tried = {rate: of_causal("rates", f"{family}_once", rate, 0) for rate in OF_DECODERS}
        yield from tried.values()
        losses = {rate: read_json(file)["loss"] for rate, item in tried.items() if (file := item.found(runs)) is not None}
        if losses and all(item.done(runs) for item in tried.values()):
            best[family] = min(losses, key=losses.__getitem__)
    for seed in range(3):
        for family, rate in best.items():
            for arm in ("once", "half_twice", "twice", *(("deep",) if family == "additive" else ())):
                yield of_causal("main", f"{family}_{arm}", rate, seed)


def of_causal(part: str, arm: str, rate: str, seed: int) -> Item:
    folder = f"{part}/{arm}" + (f"-learning_rate={rate}" if part == "rates" else "") + f"/seed-{seed}"
    return Item(
        f"causal_pnn, {part}, {arm}, seed {seed}" + (f", {rate}" if part == "rates" else ""),
        1.9 if arm.endswith(("_twice", "_deep")) and "half" not in arm else 1.5,
        f"bash {HERE}/causal_pnn/one.sh {part} {arm} {rate} {seed} {{data}} {{runs}}/causal_pnn",
        f"causal_pnn/{folder}/evaluation.json",
        f"causal_pnn/measured/{folder}/evaluation.json",
        (*WIKIPEDIA, "gpt2/tokenizer.json"),
        model=arm,
    )
