"""Configs and corpora that nobody would write: hypothesis invents values, YAML and text."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import lzma
import random
import shutil
from pathlib import Path
from typing import Any

import yaml
from counting import Tally
from damage import ODD, flip, spoil
from fuzz import inside, judge, leftovers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from stage import TINY

SHORT = {"max_steps": 1, "average_decay": None, "warmup_steps": 0}
# What these ask for is long, not wrong: a large number is left out
MUCH = {"synthetic_paragraphs", "mask_draws", "max_steps", "epochs", "num_steps", "num_hidden_layers"}
LARGE = 1000
FIELDS = ("hidden_size", "num_attention_heads", "intermediate_size", "num_steps", "dropout", "gate", "step_weights", "update")
FIELDS += ("type", "architecture", "tie_word_embeddings", "initializer_range", "layer_norm_eps", "vocab_size", "schedule")


def without_deadline(count: int) -> Any:
    """Exactly so many examples, none of them remembered or made smaller."""
    return settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )


def keys() -> list[tuple[str, ...]]:
    from pnn.config import PlasticityConfig, RunConfig

    known = [one for one in dataclasses.fields(RunConfig) if one.name not in ("name", "model", "plasticity")]
    sections = [*((one.name, one.default_factory) for one in known), ("plasticity", PlasticityConfig)]
    own = [(name, one.name) for name, make in sections for one in dataclasses.fields(make())]  # type: ignore[operator, misc]
    return [("name",), *own, *(("model", name) for name in FIELDS), ("extends",), ("evaluation", "sets", "x")]


def values() -> st.SearchStrategy[Any]:
    small = st.sampled_from([0, 1, 2, 3, 5, 16, 17, 0.0, 1e-9, 0.1, 0.5, 0.999, 1.0, 2.5, True, False, None])
    plain = st.one_of(
        small, small, st.sampled_from(ODD), st.integers(), st.floats(), st.text(max_size=12), st.booleans(), st.none()
    )
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    )


def is_much(path: tuple[str, ...], value: Any) -> bool:
    try:
        return path[-1] in MUCH and float(value) > LARGE
    except (TypeError, ValueError, OverflowError):
        return False


def changed(base: dict[str, Any], changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    out = copy.deepcopy(base)
    for path, value in changes:
        target = out
        for key in path[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                break
        else:
            target[path[-1]] = value
    return out


def configs(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """Every case is `pnn train` of a config; one that is accepted makes one update."""
    tally = Tally()
    base = changed(TINY, [(("training", key), value) for key, value in SHORT.items()])
    odd_text = st.tuples(st.just("text"), st.text(max_size=200))
    changes = st.tuples(st.sampled_from(keys()), values())
    odd_values = st.tuples(st.just("values"), st.lists(changes, min_size=1, max_size=1) | st.lists(changes, max_size=3))
    odd_bytes = st.tuples(st.just("bytes"), st.integers(0, 2**32))
    odd_settings = st.tuples(st.just("set"), st.lists(st.text(max_size=30) | st.sampled_from(SETTINGS), min_size=1, max_size=3))

    @seeded(seed * 1_000_003 + first)
    @without_deadline(count)
    @given(st.one_of(odd_values, odd_values, odd_values, odd_bytes, odd_text, odd_settings))
    def one(case: tuple[str, Any]) -> None:
        kind, what = case
        words: list[object] = ["train", "odd.yaml", "--output", "out"]
        text = yaml.safe_dump(base)
        if kind == "values":
            text = yaml.safe_dump(changed(base, [(path, value) for path, value in what if not is_much(path, value)]))
        elif kind == "text":
            text = what.encode("utf-8", "replace").decode()
        elif kind == "set":
            words += [word for one in what for word in ("--set", one)]
        if kind in ("text", "bytes"):  # what is left of it may be a good config of something larger
            words += [word for one in TINIEST for word in ("--set", one)]
        raw = text.encode("utf-8", "surrogatepass")
        Path("odd.yaml").write_bytes(spoil(raw, random.Random(what)) if kind == "bytes" else raw)
        shutil.rmtree("out", ignore_errors=True)
        ended = judge(tally, f"config {what!r}", words)
        if ended == "refused" and Path("out").exists() and not _ran(Path("out")):
            tally.count("left", f"a refused config left {[str(path) for path in Path('out').rglob('*')][:4]}: {what!r}")
        if found := leftovers(Path()):
            tally.count("left", f"{found[:3]}: {what!r}")

    with inside(folder):
        Path("odd.yaml").write_text(yaml.safe_dump(base))
        assert judge(Tally(), "as it should be", ["train", "odd.yaml", "--output", "out"]) == "accepted"
        one()
    return tally


def _ran(run: Path) -> bool:
    """Training had begun: what it is refused for was found by computing (a loss that is not finite, say)."""
    return (run / "environment.json").exists()


TINIEST = ["training.max_steps=1", "data.synthetic_paragraphs=60", "data.validation_sequences=10", "training.tensorboard=false"]
TINIEST += ["model.hidden_size=16", "model.intermediate_size=16", "training.batch_size=4", "training.effective_batch_size=4"]
SETTINGS = [
    *("model.hidden_size=7", "model.num_attention_heads=0", "training.batch_size=3", "training.precision=fp16", "data.train="),
    *(
        "training.learning_rate=1e30",
        "data.max_length=3",
        "data.filter=[",
        "a.b.c=1",
        "=",
        "model=3",
        "data=",
        "training.seed=-1",
    ),
    *(
        "evaluation.sets={x: 3}",
        "evaluation.sets.x.source=none",
        "model.type=ddl",
        "model.type=bert",
        "model.type=transformers",
    ),
    *("data.tokenizer=odd.yaml", "data.train=odd.yaml", "data.train=/dev/null", "data.train=.", "data.validation=odd.yaml"),
]


# Corpora --------------------------------------------------------------------------------------------------------------

PACKED = {".gz": gzip.compress, ".xz": lzma.compress}


def corpora(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """Every case is `pnn data prepare` of one file. Damage to a packed file may not change the text in silence."""
    tally = Tally()
    good = "\n".join(f"line {number} of a text that can be read without any trouble at all" for number in range(30))
    lines = st.lists(st.text(max_size=60) | st.just(good[:70]), max_size=25).map("\n".join)
    raw = lines.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=400)
    records = st.lists(st.dictionaries(st.sampled_from(["text", "x"]), values(), max_size=2) | values(), max_size=8)
    jsonl = records.map(lambda found: "\n".join(json.dumps(one) for one in found).encode())
    files = st.one_of(
        st.tuples(st.just(".txt"), raw),
        st.tuples(st.just(".jsonl"), jsonl | raw),
        st.tuples(st.sampled_from([".gz", ".xz"]), st.integers(0, 2**32)),
        st.tuples(st.sampled_from([".gz", ".xz", ".parquet", ".json", ".tokens"]), raw),
    )
    short_lines, rows = ["--set", "model.type=pnn"], ["--set", "model.type=ddl", "--set", "data.max_length=8"]

    @seeded(seed * 1_000_003 + first)
    @without_deadline(count)
    @given(files, st.sampled_from([short_lines, rows]))
    def one(file: tuple[str, Any], layout: list[str]) -> None:
        ending, what = file
        shutil.rmtree("prepared", ignore_errors=True)
        name = f"text.txt{ending}" if ending in PACKED else f"text{ending}"
        damaged = isinstance(what, int)
        Path(name).write_bytes(flip(PACKED[ending](good.encode()), random.Random(what)) if damaged else what)
        words = ["data", "prepare", "odd.yaml", "--set", f"data.train={name}", *layout]
        ended = judge(tally, f"corpus {name} {what!r}", words)
        Path(name).unlink()
        if damaged and ended == "accepted" and _tokens(Path("prepared")) != expected(tuple(layout)):
            tally.count("differences", f"a flipped bit in {name} changed the text: {what}")
        if found := leftovers(Path()):
            tally.count("left", f"{found[:3]}: {file!r}")

    def expected(layout: tuple[str, ...], known: dict[tuple[str, ...], list[bytes]] = {}) -> list[bytes]:  # noqa: B006
        if layout not in known:
            shutil.rmtree("prepared", ignore_errors=True)
            Path("text.txt").write_text(good)
            judge(Tally(), "undamaged", ["data", "prepare", "odd.yaml", "--set", "data.train=text.txt", *layout])
            known[layout] = _tokens(Path("prepared"))
        return known[layout]

    with inside(folder):
        of_text = [(("data", "filter"), "none"), (("data", "vocab_size"), 60), (("data", "validation_sequences"), 2)]
        Path("odd.yaml").write_text(yaml.safe_dump(changed({**TINY, "model": {}}, of_text)))
        assert expected(tuple(short_lines))
        assert expected(tuple(rows))
        one()
    return tally


def _tokens(prepared: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(prepared.glob("*/*.bin"))]
