from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.tables import print_benchmark
from pnn.cli.train import Setting

QUICKSTART = ("quickstart_pnn", "quickstart_bert")


@app.command()
def bench(
    configs: Annotated[
        list[str] | None, typer.Argument(help="Shipped configs' names or YAML files. Default: quickstart's two models.")
    ] = None,
    what: Annotated[
        str, typer.Option(help="What to time, separated by commas: train, inference, processes, scaling.")
    ] = "train,inference",
    against: Annotated[
        str, typer.Option(help="Baselines: naive (of PNN), transformers (of BERT), or none.")
    ] = "naive,transformers",
    seconds: Annotated[float, typer.Option(help="Seconds on the clock for each row, in seven blocks.", min=0.01)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/<what>-<hardware>.json")] = None,
    settings: Setting = None,
) -> None:
    """Time training and inference beside the naive PNN and transformers' BERT, in one run on this machine.

    Example: pnn bench pnn_wikitext103 bert_baseline --set data.train='text/*.txt.xz'

    How the cost grows, with a figure: pnn bench quickstart_pnn --what scaling
    """
    from pnn.bench.run import benchmark
    from pnn.bench.timing import Budget
    from pnn.config import load_config
    from pnn.figures.scaling import scaling
    from pnn.figures.style import png, save

    def listed(words: str) -> list[str]:
        return [] if words == "none" else [word.strip() for word in words.split(",") if word.strip()]

    runs = [load_config(name, settings or []) for name in configs or QUICKSTART]
    result, path = benchmark(runs, listed(what), listed(against), Budget(seconds=seconds), out)
    print_benchmark(result)
    print(f"\nWrote {path}")
    if "scaling" in listed(what):
        print(f"Wrote {save(png(scaling(result)), path.with_suffix('.png'))}")
