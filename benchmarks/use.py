"""What using a model takes, and training it, beside what others take: all ratios of one machine in one file.

python benchmarks/use.py OUT TEXT BERT_TOKENIZER GPT2_TOKENIZER [latency generate decoders heads inference train]

TEXT: files with text, 'wikipedia/part-00.txt.xz'; tokenizers: folders or names. Five minutes on an H200 without `train`, which
compiles decoders. Parts that were measured before stay in OUT; `parts` there says of which commit each is.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config

from pnn.bench.heads import heads_benchmark
from pnn.bench.run import benchmark
from pnn.bench.timing import Budget, machine
from pnn.config import load_config
from pnn.files import write_json

REWRITE = str(Path(__file__).parents[1] / "results/better_than_bert/configs/pnn_rewrite.yaml")
DECODERS = ["ddl_small_additive", "ddl_small", "ddl_small_token"]


@dataclass(frozen=True)
class Part:
    """What `pnn bench` is asked for."""

    configs: list[str]
    what: str
    against: list[str]
    settings: list[str] = field(default_factory=list)
    seconds: float = 4.0


def parts_for(text: str, bert: str, gpt2: str) -> dict[str, list[Part]]:
    on_text = [f"data.train={text}", "data.validation=tail", "data.validation_sequences=3000", "data.max_sequences=60000"]
    encoders, decoders = ([*on_text, f"data.tokenizer={tokenizer}"] for tokenizer in (bert, gpt2))
    whole_update = ["training.batch_size=1152"]  # the paper's update in one piece, as a large GPU takes it
    rows = ["training.batch_size=32", "training.effective_batch_size=32", "data.validation_sequences=100"]
    return {
        "latency": [
            Part(["pnn_wikitext103"], "latency", ["transformers", "compiled", "onnx", "int8"]),
            Part([REWRITE], "latency", ["transformers", "onnx", "int8"]),
        ],
        "generate": [Part(["ddl_small_scalar"], "generate", ["transformers", "batches"], seconds=1.0)],
        "decoders": [Part(DECODERS, "generate", [], seconds=1.0)],
        "inference": [Part(["pnn_wikitext103", "bert_baseline"], "inference", ["naive", "transformers"], encoders)],
        "train": [
            Part(["pnn_wikitext103"], "train", ["naive"], [*encoders, *whole_update]),
            Part(["ddl_small_additive", "ddl_small_token"], "train", [], [*decoders, *rows]),
        ],
    }


def measure(parts: list[Part], result: dict[str, Any], out: Path) -> None:
    """Add the rows and ratios of these parts to `result`, and write it."""
    rows: list[dict[str, Any]] = []
    for part in parts:
        runs = [load_config(name, part.settings) for name in part.configs]
        with tempfile.TemporaryDirectory() as folder:
            found, _ = benchmark(runs, [part.what], part.against, Budget(seconds=part.seconds), Path(folder) / "part.json")
        rows += found["rows"]
        rates = {key: found[key] for key in ("matrix_rate", "copy_rate") if found.get(key)}
        result["rates"][f"{part.what}: {', '.join(run.name for run in runs)}"] = rates  # of the machine that timed these
        result["ratios"] |= found["ratios"]
    measured = {(row["what"], row["config"]) for row in rows}
    result["rows"] = [row for row in result["rows"] if (row["what"], row["config"]) not in measured] + rows
    write_json(out, result)


def measure_heads(result: dict[str, Any], out: Path) -> None:
    on_gpu = torch.cuda.is_available()
    shape = (torch.device("cuda"), 32, 1024, (64, 256)) if on_gpu else (torch.device("cpu"), 4, 256, (4, 256))
    device, rows, length, read = shape
    found = heads_benchmark(GPT2Config(), rows, length, backward=on_gpu, device=device, seconds=4.0, read=read)
    result["ratios"] |= found["ratios"]
    result["heads"] = found["rows"]
    write_json(out, result)


def main() -> None:
    where, text, bert, gpt2, *chosen = sys.argv[1:]
    out, parts = Path(where), parts_for(text, bert, gpt2)
    result: dict[str, Any] = {"rows": [], "ratios": {}, "rates": {}, "parts": {}}
    if out.exists():
        result = json.loads(out.read_text())
    result |= {**machine(), "date": datetime.date.today().isoformat()}
    for name in chosen or ["latency", "generate", "decoders", "heads", "inference"]:
        result["parts"][name] = result["git"]["commit"]
        measure_heads(result, out) if name == "heads" else measure(parts[name], result, out)
    for name, value in result["ratios"].items():
        print(f"{name:44} {value:.3g}")
    print(f"Wrote {out}")


if __name__ == "__main__":
    main()
