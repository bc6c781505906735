"""What a masked model loses and gains in int8 on a CPU.

python benchmarks/int8.py OUT MODEL TEXT [--draws 4] [--sequences 500]

MODEL: a run or a folder of a masked model; TEXT: files, such as wikitext-103/wiki.valid.tokens. It counts masked tokens that
fp32 (torch) and int8 (the graph of `pnn export --onnx --int8`) get right. Both see the same masks, so points lost are paired by
sequence. Then both graphs, fp32 and int8, answer one batch in turns. --sequences: so many of the text, spread over it.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pnn.bench.latency import onnx_session
from pnn.bench.timing import machine
from pnn.data.batches import PackedBatch, evaluation_batches, special_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import TokenSet, prepare_source
from pnn.evaluation.masked import evaluate_masked
from pnn.evaluation.reading import text_of_a_bare_checkpoint
from pnn.export.onnx import write_int8, write_onnx
from pnn.files import write_json
from pnn.models.loading import load_run
from pnn.progress import track
from pnn.stats import ratio_interval
from pnn.turns import take_turns

SHARE, BATCH_TOKENS = 0.15, 1024


def rows_of(batch: PackedBatch, ids: torch.Tensor) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.bool_]]:
    """A packed batch as the padded rows that a graph takes, and which places of them hold tokens."""
    lengths = batch.cu_seqlens.diff().numpy()
    keep = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(keep.shape, np.int64)
    padded[keep] = ids.numpy()
    return {"input_ids": padded, "attention_mask": keep.astype(np.int64)}, keep


def right_by_sequence(session: Any, tokens: TokenSet, sequences: NDArray[np.int64], draws: int) -> NDArray[np.float64]:
    """What `evaluate_masked` counts, of a graph."""
    special = special_tokens(tokens.tokenizer())
    right = np.zeros(len(sequences))
    for draw in range(draws):
        for batch, indices in evaluation_batches(tokens, sequences, BATCH_TOKENS):
            masked = batch.mask(special, SHARE, draw)
            feed, keep = rows_of(batch, masked.input_ids)
            said = session.run(["logits"], feed)[0].argmax(-1)[keep][masked.positions.numpy()]
            sequence = indices[np.searchsorted(batch.cu_seqlens.numpy(), masked.positions.numpy(), side="right") - 1]
            np.add.at(right, sequence, said == masked.labels.numpy())
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--draws", type=int, default=4, help="of masks")
    parser.add_argument("--sequences", type=int, help="of the text (default: all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing")
    asked = parser.parse_args()

    loaded = load_run(asked.model, device="cpu")
    model, data = loaded.model.float(), text_of_a_bare_checkpoint(loaded.model)
    tokens = prepare_source(open_source(asked.text, data, "validation"), loaded.tokenizer, data, track)
    sequences = np.arange(0, len(tokens), max(1, len(tokens) // (asked.sequences or len(tokens))))[: asked.sequences]
    exact = evaluate_masked(model, tokens, sequences, mask_probability=SHARE, mask_draws=asked.draws, batch_tokens=BATCH_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        fp32, int8 = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        write_onnx(fp32, model, None)
        off = write_int8(int8, fp32, model)
        sizes = {path.stem: path.stat().st_size for path in (fp32, int8)}
        sessions = {path.stem: onnx_session(path) for path in (fp32, int8)}
    right = right_by_sequence(sessions["int8"], tokens, sequences, asked.draws)
    targets, correct = (np.asarray(exact["by_sequence"][key], np.float64) for key in ("targets", "correct"))
    batch, _ = next(evaluation_batches(tokens, sequences, BATCH_TOKENS))
    feed, _ = rows_of(batch, batch.input_ids)
    answers = {name: lambda one=one: one.run(["logits"], feed) for name, one in sessions.items()}
    times = take_turns(answers, torch.device("cpu"), asked.seconds)
    result = {
        **machine(),
        "date": datetime.date.today().isoformat(),
        "model": Path(asked.model).name,
        "text": Path(asked.text).name,
        "sequences": len(sequences),
        "mask_draws": asked.draws,
        "targets": int(targets.sum()),
        "accuracy": {"fp32": correct.sum() / targets.sum(), "int8": right.sum() / targets.sum()},
        "points_lost": (ratio_interval(100 * (correct - right), targets)).as_json(),
        "logits_off_by_share_of_spread": off,
        "bytes": sizes,
        "rows": [
            {
                "name": f"onnxruntime, {name}",
                "threads": torch.get_num_threads(),
                "shapes": {"rows": len(feed["input_ids"]), "tokens": len(batch.input_ids)},
                "milliseconds": 1000 * statistics.median(taken),
                "turns": len(taken),
            }
            for name, taken in times.items()
        ],
        "ratios": {
            "int8_vs_fp32": statistics.median(a / b for a, b in zip(times["fp32"], times["int8"], strict=True)),
            "int8_bytes_vs_fp32": sizes["int8"] / sizes["fp32"],
        },
    }
    write_json(asked.out, result)
    print({key: result[key] for key in ("accuracy", "points_lost", "ratios")})
    print(f"Wrote {asked.out}")


if __name__ == "__main__":
    main()
