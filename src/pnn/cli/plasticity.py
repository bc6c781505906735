from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, Resume, Run
from pnn.files import is_taken
from pnn.numbers import several
from pnn.progress import say

group = typer.Typer(help="Prune attention heads, measure, grow new ones, learn.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="plasticity")

Data = Annotated[str | None, typer.Option(help="Text to look at: files (a path or glob), synthetic, or a hub name.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens per row. Default: the model's context, at most 128")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.", min=0)]
PerLayer = Annotated[bool, typer.Option(help="Prune the same share of every layer.")]
WholeLayers = Annotated[bool, typer.Option(help="A layer may lose all its heads.")]
Beyond = Annotated[int, typer.Option(help="Heads that a layer may grow beyond its original number, in each round.", min=0)]
Init = Annotated[str, typer.Option(help="How new heads start: zero, random, clone, or in a cycle revive (as they were).")]
Teacher = Annotated[
    str, typer.Option(help="What to learn from the unpruned model: logits, states (both), or none (learn the text).")
]
Folder = Annotated[Path, typer.Option(help="New folder for the model.")]
SCORES = "entropy, normalised_entropy, magnitude, contribution, gradient, random or combined."
PLACES = "gradient, entropy_gap, balanced, random"


@group.command()
def cycle(
    model: Run,
    data: Annotated[str, typer.Option(help="Text to learn from: files (a path or glob), synthetic, or a hub name.")],
    validation: Annotated[str | None, typer.Option(help="Text to measure on. Default: the last tenth of --data")] = None,
    validation_rows: Annotated[int, typer.Option(help="Most rows to measure on.", min=2)] = 64,
    max_length: MaxLength = None,
    rounds: Annotated[int, typer.Option(help="How many times to go through all four phases.", min=1)] = 1,
    prune: Annotated[float, typer.Option(help="Share of the heads to prune per round.")] = 0.3,
    grow: Annotated[float, typer.Option(help="Share of the original number to grow per round; 0 grows none.")] = 0.1,
    prune_by: Annotated[str, typer.Option(help=SCORES)] = "gradient",
    grow_by: Annotated[str, typer.Option(help=f"{PLACES} or importance.")] = "gradient",
    per_layer: PerLayer = False,
    whole_layers: WholeLayers = False,
    beyond: Beyond = 0,
    init: Init = "zero",
    learn_steps: Annotated[int, typer.Option(help="Updates per round.", min=0)] = 100,
    learning_rate: Annotated[float, typer.Option(help="At the start of a round; a cosine takes it to a tenth.")] = 5e-5,
    multiplier: Annotated[float, typer.Option(help="How much faster new heads learn.")] = 3.0,
    teacher: Teacher = "none",
    batch_size: Annotated[int, typer.Option(help="Rows per update.", min=1)] = 4,
    evaluate_every: Annotated[int, typer.Option(help="Updates between measurements on held-out text.", min=1)] = 25,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/<model's name>-cycle")] = None,
    resume: Resume = False,
) -> None:
    """Prune heads, measure, grow heads, learn; repeat.

    The result is a run folder whose checkpoints/last loads in one call, with head maps, perplexities and figures.

    Example: pnn plasticity cycle runs/ddl_tiny --data 'text/*.txt' --prune 0.3 --grow 0.1 --output runs/reorganised
    """
    from pnn.cli.tables import print_cycle
    from pnn.figures.plasticity import CYCLE_FIGURES
    from pnn.figures.style import png, save
    from pnn.plasticity import CycleSettings
    from pnn.plasticity.run import run_cycle
    from pnn.progress import track
    from pnn.runs import read_json, read_metrics

    settings = CycleSettings(
        rounds=rounds,
        prune=prune,
        grow=grow,
        prune_by=prune_by,
        grow_by=grow_by,
        per_layer=per_layer,
        whole_layers=whole_layers,
        beyond=beyond,
        init=init,
        learn_steps=learn_steps,
        learning_rate=learning_rate,
        multiplier=multiplier,
        teacher=teacher,
        batch_rows=batch_size,
        evaluate_every=evaluate_every,
        seed=seed,
    )
    folder = output or Path("runs") / f"{Path(model).name}-cycle"
    _note_nothing_to_resume(folder, resume)
    run_cycle(
        model,
        data,
        folder,
        settings,
        validation=validation,
        length=max_length,
        held_out_rows=validation_rows,
        resume=resume,
        progress=track,
    )
    records = read_metrics(folder / "metrics.jsonl")
    for name, draw in CYCLE_FIGURES.items():
        save(png(draw(records)), folder / "figures" / f"{name}.png")
    print_cycle(read_json(folder / "summary.json"), records)
    print(f"Wrote {folder}: summary.json, metrics.jsonl, figures/ and checkpoints/last")


@group.command()
def study(
    models: Annotated[list[str], typer.Argument(help="Run folders, checkpoint folders or hub names, of different sizes.")],
    data: Annotated[list[str], typer.Option(help="Text to learn from, once for all models or once for each.")],
    output: Annotated[Path, typer.Option(help="Folder of the study.")],
    validation: Annotated[str | None, typer.Option(help="Text to measure on. Default: the last tenth of --data")] = None,
    validation_rows: Annotated[int, typer.Option(help="Rows to measure on, at most.", min=2)] = 64,
    max_length: MaxLength = None,
    seeds: Annotated[int, typer.Option(help="Orders of the text; intervals are over these.", min=1)] = 3,
    learn_steps: Annotated[int, typer.Option(help="Updates per arm.", min=1)] = 100,
    learning_rate: Annotated[float, typer.Option(help="At the start; a cosine takes it to a tenth.")] = 5e-5,
    batch_size: Annotated[int, typer.Option(help="Rows per update.", min=1)] = 8,
    score_rows: Annotated[int, typer.Option(help="Rows that heads are scored on.", min=1)] = 32,
    evaluate_every: Annotated[int, typer.Option(help="Updates between measurements on held-out text.", min=1)] = 10,
    jobs: Annotated[int, typer.Option(help="Processes that share the work, and the GPU.", min=1)] = 1,
    resume: Resume = False,
) -> None:
    """Test the published findings about the cycle.

    Tries strategies, ratios and learning rates against controls, with several seeds: 37 cycles per model and seed, all with
    the same number of updates. Writes study.json with a verdict for each of the published findings, and figures.

    Example: pnn plasticity study runs/gpt2_distil runs/gpt2_small --data 'text/*.txt' --output runs/study --jobs 4
    """
    from pnn.cli.tables import print_study
    from pnn.figures.plasticity_study import STUDY_FIGURES
    from pnn.figures.style import png, save
    from pnn.studies.plasticity.arms import StudySettings
    from pnn.studies.plasticity.study import run_study, sources_of

    plan = StudySettings(seeds, learn_steps, learning_rate, batch_size, score_rows, evaluate_every)
    _note_nothing_to_resume(output, resume)
    sources = sources_of(models, data, validation, max_length, validation_rows)
    result = run_study(output, sources, plan, jobs=jobs, resume=resume)
    for name, draw in STUDY_FIGURES.items():
        save(png(draw(result)), output / "figures" / f"{name}.png")
    print_study(result)
    print(f"Wrote {output}: study.json, arms/ and figures/")


@group.command()
def score(
    model: Run,
    data: Data = None,
    by: Annotated[str, typer.Option(help=SCORES)] = "gradient",
    max_length: MaxLength = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how useful each head is.

    Example: pnn plasticity score runs/ddl_tiny --data text.txt --by entropy
    """
    from pnn.cli.tables import print_head_scores
    from pnn.plasticity.run import run_score
    from pnn.progress import track

    result = run_score(model, data, by, length=max_length, seed=seed, progress=track)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_head_scores(result)


@group.command()
def prune(
    model: Run,
    output: Folder,
    ratio: Annotated[float, typer.Option(help="Share of the heads to prune.")] = 0.3,
    by: Annotated[str, typer.Option(help=SCORES)] = "gradient",
    data: Data = None,
    per_layer: PerLayer = False,
    whole_layers: WholeLayers = False,
    max_length: MaxLength = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Remove heads: a smaller model in a new folder.

    Example: pnn plasticity prune runs/ddl_tiny --ratio 0.3 --data text.txt --output smaller
    """
    from pnn.plasticity.run import run_prune
    from pnn.progress import track

    result = run_prune(
        model,
        data,
        output,
        ratio=ratio,
        method=by,
        per_layer=per_layer,
        whole_layers=whole_layers,
        length=max_length,
        seed=seed,
        progress=track,
    )
    _print_changed(result, "pruned", output, as_json)


@group.command()
def grow(
    model: Run,
    output: Folder,
    ratio: Annotated[float, typer.Option(help="Share of the original number of heads to grow.")] = 0.1,
    by: Annotated[str, typer.Option(help=f"{PLACES}.")] = "gradient",
    data: Data = None,
    init: Init = "zero",
    beyond: Beyond = 0,
    max_length: MaxLength = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Grow heads: a larger model in a new folder.

    Example: pnn plasticity grow smaller --ratio 0.1 --data text.txt --output larger
    """
    from pnn.plasticity.run import run_grow
    from pnn.progress import track

    result = run_grow(
        model,
        data,
        output,
        ratio=ratio,
        method=by,
        init=init,
        beyond=beyond,
        length=max_length,
        seed=seed,
        progress=track,
    )
    _print_changed(result, "grown", output, as_json)


def _note_nothing_to_resume(folder: Path, resume: bool) -> None:
    if resume and not is_taken(folder):
        say(f"nothing to resume in {folder}: starting from the beginning")


def _print_changed(result: dict[str, object], what: str, output: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    which = result[what]
    assert isinstance(which, list)
    names = ", ".join(f"{one['layer']}.{one['head']}" for one in which)
    print(f"{what} {several(len(which), 'head')} (layer.head): {names or 'none'}")
    print(f"heads {result['heads_before']} → {result['heads']}")
    print(f"parameters {result['parameters_before']:,} → {result['parameters']:,}")
    print(f"Wrote {output}")
