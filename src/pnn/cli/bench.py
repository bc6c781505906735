from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import Configs, Setting
from pnn.config import load_config

QUICKSTART = ("quickstart_pnn", "quickstart_bert")


@app.command()
def bench(
    configs: Configs = None,
    what: Annotated[
        str, typer.Option(help="What to time, separated by commas: train, inference, latency, generate, processes, scaling.")
    ] = "train,inference",
    against: Annotated[
        str,
        typer.Option(help="Baselines: naive (PNN), transformers; latency: compiled, onnx, int8; generate: batches; or none."),
    ] = "naive,transformers",
    seconds: Annotated[float, typer.Option(help="Seconds of timing per row, in seven blocks.", min=0.01)] = 10.0,
    output: Annotated[
        Path | None, typer.Option(help="File for the result. Default: benchmarks/results/<what>-<hardware>.json")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the default file if it exists.")] = False,
    settings: Setting = None,
) -> None:
    """Time training and inference on this machine.

    The naive PNN and transformers' BERT are timed in the same run. An existing result stays unless --output names it.

    Example: pnn bench pnn_wikitext103 bert_baseline --set data.train='text/*.txt.xz'

    How the cost grows, with a figure: pnn bench quickstart_pnn --what scaling
    """
    runs = [load_config(name, settings or []) for name in configs or QUICKSTART]

    from pnn.bench.run import benchmark
    from pnn.bench.timing import Budget
    from pnn.cli.tables import print_benchmark
    from pnn.figures.scaling import scaling
    from pnn.figures.style import png, save

    def listed(words: str) -> list[str]:
        return [] if words == "none" else [word.strip() for word in words.split(",") if word.strip()]

    result, path = benchmark(runs, listed(what), listed(against), Budget(seconds=seconds), output, overwrite=overwrite)
    print_benchmark(result)
    print(f"\nWrote {path}")
    if "scaling" in listed(what):
        print(f"Wrote {save(png(scaling(result)), path.with_suffix('.png'))}")
