"""How fast a large text becomes tokens, and tokens become masked batches, beside `datasets.map` with the same tokenizer.

python benchmarks/reading.py OUT TEXT TOKENIZER [MEGABYTES]      # TEXT is repeated until there is so much of it: 100

Both read one plain file and write their result to disk, with all cores: ours by `pnn data prepare`'s function, theirs by
`load_dataset("text")` and `map` in as many processes as there are cores. They take turns; the minutes of a gigabyte follow from
the rate, which is the same for every part of a text.
"""

from __future__ import annotations

import lzma
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pnn.bench.timing import machine
from pnn.config import DataConfig
from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.shards import Prepared, prepare
from pnn.data.tokenizers import load_tokenizer
from pnn.files import write_json

TURNS = 3
MAX_LENGTH = 128


def write_text(path: Path, source: Path, megabytes: float) -> int:
    """So many bytes of whole lines of the source, repeated as often as it takes."""
    text = lzma.decompress(source.read_bytes()) if source.suffix == ".xz" else source.read_bytes()
    wanted = int(megabytes * 1e6)
    whole = (text + b"\n") * (wanted // (len(text) + 1) + 1)
    path.write_bytes(whole[: whole.rindex(b"\n", 0, wanted) + 1])
    return path.stat().st_size


def by_pnn(text: Path, tokenizer: str, folder: Path) -> Prepared:
    text_as_it_is = {"max_length": MAX_LENGTH, "filter": "none", "validation_sequences": 100}
    data = DataConfig(train=str(text), tokenizer=tokenizer, prepared=str(folder), **text_as_it_is)
    return prepare(data, lambda items, _: items)


def by_datasets(text: Path, tokenizer: str, folder: Path) -> int:
    """Its tokens. As its users do it: batched, in several processes, the fast tokenizer."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its processes are what is parallel
    import datasets

    datasets.disable_progress_bars()
    made = load_tokenizer(tokenizer, MAX_LENGTH)
    lines = datasets.load_dataset("text", data_files=str(text), split="train", cache_dir=str(folder))
    lines = lines.filter(lambda batch: [bool(one.strip()) for one in batch["text"]], batched=True, num_proc=os.cpu_count())
    encoded = lines.map(
        lambda batch: {"input_ids": made(batch["text"], truncation=True, max_length=MAX_LENGTH)["input_ids"]},
        batched=True,
        num_proc=os.cpu_count(),
        remove_columns=["text"],
    )
    del os.environ["TOKENIZERS_PARALLELISM"]
    return len(encoded)


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def masking_rate(prepared: Prepared) -> float:
    """Tokens a second, packed into batches and masked, on one core."""
    special, sequences = special_tokens(prepared.tokenizer), prepared.train_sequences
    started, tokens = time.perf_counter(), 0
    for packed, _ in evaluation_batches(prepared.train, sequences, 16384):
        packed.mask(special, 0.15, 0)
        tokens += len(packed.input_ids)
    return tokens / (time.perf_counter() - started)


def measure(source: Path, tokenizer: str, megabytes: float) -> dict[str, Any]:
    times: dict[str, list[float]] = {"pnn": [], "datasets": []}
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        size = write_text(text, source, megabytes)
        for turn in range(TURNS):
            folder = Path(scratch) / f"turn {turn}"
            times["pnn"].append(seconds_of(lambda folder=folder: by_pnn(text, tokenizer, folder / "pnn")))
            times["datasets"].append(seconds_of(lambda folder=folder: by_datasets(text, tokenizer, folder / "datasets")))
        prepared = by_pnn(text, tokenizer, Path(scratch) / "turn 0" / "pnn")  # made already: found again
        tokens, masked = int(prepared.train.lengths.sum()), masking_rate(prepared)
    rows = [
        {
            "name": name,
            "what": "reading",
            "bytes": size,
            "tokens": tokens,
            "seconds": taken,
            "megabytes_per_second": size / 1e6 / statistics.median(taken),
            "minutes_for_a_gigabyte": 1e9 / size * statistics.median(taken) / 60,  # extrapolated
        }
        for name, taken in times.items()
    ]
    rows.append({"name": "packing and masking", "what": "reading", "tokens": tokens, "tokens_per_second": masked})
    pairs = zip(times["datasets"], times["pnn"], strict=True)
    ratios = {"reading_vs_datasets": statistics.median(theirs / ours for theirs, ours in pairs)}
    return {**machine(), "max_length": MAX_LENGTH, "rows": rows, "ratios": ratios}


def main() -> None:
    out, text, tokenizer, *size = sys.argv[1:]
    result = measure(Path(text), tokenizer, float(size[0]) if size else 100.0)
    write_json(Path(out), result)
    for row in result["rows"]:
        print(row)
    print(result["ratios"])


if __name__ == "__main__":
    main()
