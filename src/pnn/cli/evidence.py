from __future__ import annotations

import json
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.analyze import Data
from pnn.cli.options import AsJson, BatchTokens, Results, Run, Sequences
from pnn.studies.registry import experiment_names


@app.command()
def evidence(
    run: Run,
    experiment: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(experiment_names())}, or all. Repeat the option for several."),
    ] = None,
    data: Data = None,
    sequences: Sequences = None,
    batch_tokens: BatchTokens = None,
    output: Results = None,
    as_json: AsJson = False,
) -> None:
    """Test the paper's claims with its ten experiments.

    Each has a control and computes its verdict.

    Example: pnn evidence runs/quickstart/pnn --experiment gate_specificity
    """
    from pnn.cli.findings import print_findings
    from pnn.evaluation.reading import smaller_batches
    from pnn.figures.studies import figure_of
    from pnn.figures.style import png, save
    from pnn.memory import out_of_memory_says
    from pnn.progress import say, track
    from pnn.studies.registry import chosen_experiments, experiments
    from pnn.studies.run import collect_evidence, open_run

    wanted, suite = chosen_experiments(experiment), experiments()
    opened = open_run(run, progress=track, data=data, sequences=sequences, batch_tokens=batch_tokens, out=output)
    with out_of_memory_says(lambda: smaller_batches("evidence", run, tokens=opened.subject.text.batch_tokens)):
        results = collect_evidence(opened, experiment, lambda name: say(f"{name} …"))
    found = {name: results[suite[name].key] for name in wanted}
    if opened.folder is not None:
        for name, result in found.items():
            if "not_done" not in result:
                picture = opened.folder / "figures" / f"{suite[name].figure}{opened.on}.png"
                save(png(figure_of(name)(result)), picture)
    if as_json:
        print(json.dumps(results, indent=2))
        return
    print_findings(found)
    if opened.folder is not None:
        print(f"Wrote {opened.folder / 'experimental_results'}{opened.on}.json and {opened.folder / 'figures'}")
