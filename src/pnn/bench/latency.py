"""Rows of latency: one sentence of 64 tokens with one mask, from its tokens on the host to the answer on the host.

Ours goes the way of `pnn fill`. Beside it, as asked: transformers' BERT of bert-base's shape as it is (`transformers`) and
compiled (`compiled`), and our own model exported to ONNX, in onnxruntime on a CPU, in fp32 (`onnx`) and in int8 (`int8`). All
answer in turns, so that a busy machine slows all of them alike; a ratio is the median over turns of ours over theirs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from pnn.bench.inference import dtype_of, inference_precision
from pnn.bench.naive import DTYPES
from pnn.bench.timing import Budget, clean_slate, peak_memory
from pnn.bench.training import device_of, parameters_of, row_name, size_of
from pnn.config import RunConfig
from pnn.data.batches import pack
from pnn.evaluation.passes import states_at
from pnn.export.onnx import check_installed, write_int8, write_onnx
from pnn.models import flops
from pnn.models.sections import build_model, model_config
from pnn.turns import take_turns

LENGTH, MASK = 64, 4  # tokens of the sentence; the one that stands for the word that is asked for
BERT_BASE: dict[str, Any] = {}  # what differs from BertConfig's defaults, which are bert-base's
BESIDE = {
    "transformers": "transformers bert",
    "compiled": "transformers bert, compiled",
    "onnx": "onnxruntime",
    "int8": "onnxruntime, int8",
}
Answer = Callable[[], int]


def names(run: RunConfig, against: list[str]) -> list[str]:
    on_gpu = device_of(run).type == "cuda"
    return [row_name(run), *(BESIDE[one] for one in against if one in BESIDE and not (one in ("onnx", "int8") and on_gpu))]


def latency_rows(run: RunConfig, against: list[str], budget: Budget) -> dict[str, dict[str, Any]]:
    """Of ours and of everything beside it, by name."""
    device = device_of(run)
    precision = inference_precision(run) if device.type == "cuda" else "fp32"
    clean_slate(device)
    masked = {"mask_token_id": MASK} if run.model.get("guess_after") else {}
    ours = build_model(model_config(run.model, **masked)).to(device).eval()
    wanted = names(run, against)
    models: dict[str, PreTrainedModel] = {wanted[0]: ours}
    answers: dict[str, Answer] = {wanted[0]: _of_ours(ours, DTYPES[precision])}
    for name in wanted[1:]:
        if name in (BESIDE["onnx"], BESIDE["int8"]):
            models[name], answers[name] = ours, _of_onnx(ours, int8=name == BESIDE["int8"])
        else:
            models[name] = BertForMaskedLM(BertConfig(**BERT_BASE)).to(device, DTYPES[precision]).eval()
            answers[name] = _of_bert(models[name], length_of(ours), compiled=name == BESIDE["compiled"])
    with torch.inference_mode():
        times = take_turns(answers, device, budget.seconds * len(answers), warm_up=budget.warmup)
    rows = {}
    for name, taken in times.items():
        seconds = np.percentile(taken, [50, 99])
        config = models[name].config
        rows[name] = {
            "name": name,
            "what": "latency",
            "config": run.name,
            "implementation": "pnn" if models[name] is ours else "transformers",
            "compiled": name == BESIDE["compiled"],
            "parameters": parameters_of(models[name]),
            "precision": "int8" if name == BESIDE["int8"] else precision,
            "threads": torch.get_num_threads(),
            "shapes": {"batch_tokens": length_of(ours), **(size_of(config) if models[name] is ours else {})},
            "milliseconds_per_update": 1000 * seconds[0],  # the median: p50
            "milliseconds_p99": 1000 * seconds[1],
            "turns": len(taken),
            "tokens_per_second": {
                key: length_of(ours) / value
                for key, value in (("median", seconds[0]), ("low", max(taken)), ("high", min(taken)))
            },
            "flops_per_token": _flops(models[name], length_of(ours), everywhere=name != wanted[0]),
            "peak_memory_bytes": peak_memory(device),
            "ours_over_it": statistics.median(a / b for a, b in zip(times[wanted[0]], taken, strict=True)),
        }
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """pnn_latency_vs_transformers_bert and so on: below 1, ours answers sooner."""
    timed = [row for row in rows if row["what"] == "latency" and "error" not in row]
    ours = {row["config"]: row["name"].removeprefix("pnn ") for row in timed if row["name"] not in BESIDE.values()}
    found: dict[str, float] = {}
    for row in timed:
        if row["name"] in BESIDE.values():
            other = row["name"].replace(", ", "_").replace(" ", "_")
            found.setdefault(f"{ours[row['config']]}_latency_vs_{other}", row["ours_over_it"])
    return found


def length_of(model: PreTrainedModel) -> int:
    return min(LENGTH, model.config.max_position_embeddings)


def _tokens(model: PreTrainedModel, length: int) -> np.ndarray[Any, Any]:
    ids = np.random.default_rng(0).integers(MASK + 1, model.config.vocab_size, length)
    ids[length // 2] = MASK
    return ids


def _of_ours(model: Any, precision: torch.dtype) -> Answer:
    length = length_of(model)
    ids, at = _tokens(model, length), torch.tensor([length // 2])

    def answer() -> int:
        batch = pack(ids, np.array([len(ids)]), np.zeros(1, np.int64))
        with torch.autocast(model.device.type, precision, enabled=precision != dtype_of(model)):
            return int(model.read_out(states_at(model, batch, at)[-1]).argmax())

    return answer


def _of_bert(model: Any, length: int, compiled: bool) -> Answer:
    ids = torch.from_numpy(_tokens(model, length))[None]
    mask, at = torch.ones_like(ids), ids.shape[1] // 2
    on_gpu = model.device.type == "cuda"
    run = torch.compile(model, mode="reduce-overhead" if on_gpu else None) if compiled else model

    def answer() -> int:
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        return int(run(**inputs).logits[0, at].argmax())

    return answer


def _of_onnx(model: PreTrainedModel, int8: bool) -> Answer:
    check_installed()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(path, model, None)
        if int8:
            graph, path = path, Path(folder) / "int8.onnx"
            write_int8(path, graph, model)
        session = onnx_session(path)
    ids = _tokens(model, length_of(model))[None]
    feed, at = {"input_ids": ids, "attention_mask": np.ones_like(ids)}, ids.shape[1] // 2
    return lambda: int(session.run(["logits"], feed)[0][0, at].argmax())


def onnx_session(path: Path) -> Any:
    """A graph that answers in turns with others, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # else its threads go on waiting actively after an answer, and whoever has the next turn is short of a core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _flops(model: PreTrainedModel, length: int, everywhere: bool) -> float:
    """Counted as it is asked for; `everywhere`: with logits of every token."""
    config: Any = model.config
    if config.model_type != "bert":
        return flops.inference_flops(config, length, 1.0 if everywhere else 1 / length)
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrices = layers * (4 * width * width + 2 * width * inner) + width * width + width * config.vocab_size
    return 2 * matrices + 4 * length * width * layers
