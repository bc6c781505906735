"""Text → token shards on disk, made once and shared by runs; training reads them memory-mapped.

    prepared/<name>-<fingerprint>/  manifest.json  tokens-00000.bin …  lengths-00000.bin …  tokenizer/

A sequence is one line of text, [CLS] tokens [SEP], cut at `max_length`; or, for decoders, one row of running text:
documents end to end with an end-of-text token after each, cut into rows of exactly `max_length` tokens. The fingerprint
covers the text, the filter, the tokenizer and the cut, so a folder is found again if nothing changed and never mistaken if
something did. The folder appears only when it is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from pnn.config import DataConfig
from pnn.data import corpora, synthetic, tokenizers
from pnn.data.tally import Tally
from pnn.errors import UserError
from pnn.files import new_folder, sha256, write_json
from pnn.numbers import several

LINES_PER_CHUNK = 8192
DOCUMENTS_PER_CHUNK = 512
FEWEST = 2  # sequences to validate on: an interval is over sequences
CHUNKS_AHEAD = 8  # that wait for the tokenizer, at most
TOKENS_PER_SHARD = 1 << 26
TAKE_ALL = "--set data.filter=none takes every line with text"  # where a config says how text is read
LONGER_LINES = "give text with longer lines"  # where the model says it
# What is read of manifest.json, of each of its shards and of its recipe
MANIFEST: dict[str, Any] = {
    **{"name": str, "sequences": int, "tokens": int, "mean_length": int | float, "dtype": str, "max_length": int},
    **{"vocab_size": int, "recipe": dict, "shards": list},
}
SHARD = {
    f"{kind}{what}": type_ for kind in ("token", "length") for what, type_ in (("s", str), ("_bytes", int), ("_sha256", str))
}
RECIPE = {"source": dict, "text": dict, "tokenizer": str, "max_length": int}
Progress = Callable[[Iterable[Any], str], Iterable[Any]]  # wraps an iterable in a progress bar, with a label


def quietly(items: Iterable[Any], label: str) -> Iterable[Any]:
    """A `Progress` that shows nothing."""
    return items


class TokenSet:
    """Sequences of token ids, memory-mapped. `lengths[i]` is the length of sequence i; `take` gathers sequences."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_manifest(folder)
        dtype = np.dtype(self.manifest["dtype"])
        self._tokens = [np.memmap(folder / s["tokens"], dtype=dtype, mode="r") for s in self.manifest["shards"]]
        lengths = [np.fromfile(folder / s["lengths"], dtype=np.uint16).astype(np.int64) for s in self.manifest["shards"]]
        if any(len(tokens) != size.sum() for tokens, size in zip(self._tokens, lengths, strict=True)):
            raise UserError(
                f"{folder} is damaged: its lengths and its tokens do not match. Delete it and prepare the text again"
            )
        self.lengths: NDArray[np.int64] = np.concatenate(lengths)
        self._shard = np.repeat(np.arange(len(lengths)), [len(x) for x in lengths])
        self._start = np.concatenate([np.cumsum(x) - x for x in lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of these sequences, end to end."""
        lengths = self.lengths[sequences]
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        at = np.repeat(self._start[sequences], lengths) + within
        if len(self._tokens) == 1:
            return self._tokens[0][at].astype(np.int64)
        shard = np.repeat(self._shard[sequences], lengths)
        out = np.empty(len(at), dtype=np.int64)
        for index, tokens in enumerate(self._tokens):
            here = shard == index
            out[here] = tokens[at[here]]
        return out

    @property
    def fingerprint(self) -> str:
        """Of all tokens and lengths, by the checksums in the manifest."""
        return _digest([[shard["token_sha256"], shard["length_sha256"]] for shard in self.manifest["shards"]])

    @property
    def tally(self) -> Tally | None:
        """What became of the text, if it was counted: earlier versions did not."""
        return Tally(**self.manifest["text"]) if "text" in self.manifest else None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizers.load_tokenizer(str(self.folder / "tokenizer"), self.manifest["max_length"])


@dataclass(frozen=True)
class Prepared:
    """What a run trains and validates on: token sets, and which of their sequences."""

    train: TokenSet
    train_sequences: NDArray[np.int64]
    validation: TokenSet
    validation_sequences: NDArray[np.int64]
    tokenizer: PreTrainedTokenizerFast


def left_out(tokens: TokenSet) -> list[str]:
    """What of the text did not become tokens, if anything, and what to change where that is most of it."""
    tally, length = tokens.tally, tokens.manifest["max_length"]
    said = (None, None) if tally is None else (tally.sentence(length), tally.advice(length))
    return [f"{tokens.manifest['name']}: {sentence}" for sentence in said if sentence is not None]


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if not _is_manifest(manifest):
            raise UserError(f"{folder} holds no prepared text (its manifest.json is damaged or of something else)")
        for shard in manifest["shards"]:
            for name, size in ((shard["tokens"], shard["token_bytes"]), (shard["lengths"], shard["length_bytes"])):
                if (folder / name).stat().st_size != size:
                    raise UserError(f"{folder / name} is cut short: delete {folder} and prepare the text again")
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no prepared text: there is no {error.filename}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no prepared text ({error})") from None
    return manifest


def _is_manifest(found: Any) -> bool:
    """Whether what is read of it is there and of the right kind. Shards lie in the same folder."""
    return (
        has(found, MANIFEST)
        and has(found["recipe"], RECIPE)
        and all(has(shard, SHARD) for shard in found["shards"])
        and all(Path(shard[name]).name == shard[name] for shard in found["shards"] for name in ("tokens", "lengths"))
        and found["dtype"] in ("uint16", "uint32")
        and bool(found["shards"])
        and ("text" not in found or Tally.can_be(found["text"]))
    )


def has(found: Any, kinds: dict[str, Any]) -> bool:
    """Whether these keys are there, with values of these kinds."""
    return isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())


def verify(folder: Path) -> None:
    """Compare every shard with its checksum."""
    for shard in read_manifest(folder)["shards"]:
        for name, digest in ((shard["tokens"], shard["token_sha256"]), (shard["lengths"], shard["length_sha256"])):
            if sha256(folder / name) != digest:
                raise UserError(f"{folder / name} does not match its checksum: delete {folder} and prepare the text again")


def prepare(data: DataConfig, progress: Progress) -> Prepared:
    """Token shards of the training and validation text, made now or found from an earlier run."""
    source = corpora.open_source(data.train, data)
    tokenizer = choose_tokenizer(source, data, progress)
    train = prepare_source(source, tokenizer, data, progress, TAKE_ALL)
    chosen, validation = np.arange(len(train)), train
    if data.validation == "tail":
        _check_tail(len(train), data)
        chosen = chosen[: -data.validation_sequences]
    else:
        source = corpora.open_source(data.validation, data, "validation")
        validation = prepare_source(source, tokenizer, data, progress, TAKE_ALL)
    validated = held_out(validation, data)
    if len(validated) < FEWEST:
        text = data.validation if len(validation) < FEWEST else "data.validation_sequences"
        raise UserError(f"{text}: {several(len(validated), 'sequence')} to validate on, but it needs at least {FEWEST}")
    if data.max_sequences is not None and data.max_sequences < len(chosen):
        sample = np.random.default_rng(0).choice(len(chosen), data.max_sequences, replace=False)
        chosen = chosen[np.sort(sample)]
    return Prepared(train, chosen, validation, validated, tokenizer)


def _check_tail(count: int, data: DataConfig) -> None:
    """Whether a text of so many sequences leaves some to train on and enough to validate on."""
    asked, has = data.validation_sequences, f"{data.train}: {several(count, 'sequence')}"
    if count <= FEWEST:
        lines = "lines of more than 20 characters and at least 5 words" if data.filter == "paper" else "lines with text"
        what = f"rows of {data.max_length} tokens" if data.layout == "rows" else lines
        raise UserError(f"{has}, but it takes at least {FEWEST + 1} {what}: one to train on, {FEWEST} to validate on")
    if count <= asked:
        fewer = f"--set data.validation_sequences={max(FEWEST, count // 10)}"
        raise UserError(f"{has}, not enough to hold out data.validation_sequences={asked:,}: take more text, or {fewer}")


def held_out(tokens: TokenSet, data: DataConfig) -> NDArray[np.int64]:
    """Which sequences of the validation tokens are validated on."""
    everything = np.arange(len(tokens))
    return everything[-data.validation_sequences :] if data.validation == "tail" else everything[: data.validation_sequences]


def also_trained_on(prepared: Prepared) -> int:
    """How many of the sequences that are validated on occur in the training text too, token for token."""
    held = [prepared.validation.take(np.array([sequence])).tobytes() for sequence in prepared.validation_sequences]
    wanted, train, seen = set(held), prepared.train, set()
    for start in range(0, len(prepared.train_sequences), LINES_PER_CHUNK):
        chunk = prepared.train_sequences[start : start + LINES_PER_CHUNK]
        pieces = np.split(train.take(chunk), np.cumsum(train.lengths[chunk])[:-1])
        seen |= wanted.intersection(piece.tobytes() for piece in pieces)
    return sum(sequence in seen for sequence in held)


def choose_tokenizer(source: corpora.Source, data: DataConfig, progress: Progress) -> PreTrainedTokenizerFast:
    if data.tokenizer != "corpus":
        tokenizer = tokenizers.load_tokenizer(data.tokenizer, data.max_length)
        if data.layout != "rows":
            tokenizers.check_masks(tokenizer, data.tokenizer)
            tokenizers.as_it_is(tokenizer)
        return tokenizer
    if source.shards is not None:
        return TokenSet(source.shards).tokenizer()
    if source.name in synthetic.RULES:
        return tokenizers.of_synthetic_language(data.max_length, source.name)
    # Trained once, kept beside the shards under the fingerprint of the text it was trained on.
    recipe = {"source": source.identity, "vocab_size": data.vocab_size, "text": _text_recipe(data)}
    folder = Path(data.prepared) / f"tokenizer-{_digest(recipe)}"
    if not (folder / "tokenizer.json").exists():
        if next(corpora.usable_lines(source, data), None) is None:
            raise _empty(source, data, TAKE_ALL)
        lines = progress(corpora.usable_lines(source, data), "training a tokenizer")
        trained = tokenizers.trained_on(lines, data.vocab_size, data.max_length)
        with new_folder(folder) as partial:
            trained.save_pretrained(partial)
    return tokenizers.load_tokenizer(str(folder), data.max_length)


def prepare_source(
    source: corpora.Source, tokenizer: PreTrainedTokenizerFast, data: DataConfig, progress: Progress, helps: str = LONGER_LINES
) -> TokenSet:
    """`helps`: what to do where every line is too short, for the message."""
    recipe = {
        "source": source.identity,
        "text": _text_recipe(data),
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "max_length": data.max_length,
        "format": 2,  # raised when the same recipe comes to mean other tokens
    }
    if data.layout == "rows":
        recipe["layout"] = "rows"
    if source.shards is not None:
        _check_made_so(source.shards, recipe)
        return TokenSet(source.shards)
    folder = Path(data.prepared) / f"{source.stem}-{_digest(recipe)}"
    if not (folder / "manifest.json").exists():  # earlier versions had the dashes of a glob before it
        folder = next((one.parent for one in Path(data.prepared).glob(f"-*-{_digest(recipe)}/manifest.json")), folder)
    if not (folder / "manifest.json").exists():
        with new_folder(folder) as partial:
            _write_shards(partial, source, tokenizer, data, recipe, progress, helps)
    return TokenSet(folder)


def _check_made_so(folder: Path, recipe: dict[str, Any]) -> None:
    """Of shards that were named instead of a text: whether they are what the config asks for."""
    made = read_manifest(folder)["recipe"]
    for key, word in (("tokenizer", "data.tokenizer"), ("max_length", "data.max_length"), ("text", "data.filter or its marks")):
        if made[key] != recipe[key]:
            raise UserError(f"{folder} holds tokens of another {word} ({made[key]}, the config asks for {recipe[key]})")
    if made.get("layout") != recipe.get("layout"):
        raise UserError(f"{folder} holds {made.get('layout', 'lines')}, but the model reads {recipe.get('layout', 'lines')}")


def _empty(source: corpora.Source, data: DataConfig, helps: str) -> UserError:
    if data.filter != "paper":
        return UserError(f'the corpus "{source.name}" is empty: it has no text')
    return UserError(
        f'the text "{source.name}" is empty or too short: no line has more than 20 characters and at least 5 words; {helps}'
    )


def _text_recipe(data: DataConfig) -> dict[str, Any]:
    return {"filter": data.filter, "undo_wikitext_marks": data.undo_wikitext_marks}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _write_shards(
    folder: Path,
    source: corpora.Source,
    tokenizer: PreTrainedTokenizerFast,
    data: DataConfig,
    recipe: dict[str, Any],
    progress: Progress,
    helps: str,
) -> None:
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    shards: list[dict[str, Any]] = []
    tokens: list[NDArray[Any]] = []
    lengths: list[NDArray[np.uint16]] = []

    def flush() -> None:
        entry: dict[str, Any] = {}
        for kind, parts in (("token", tokens), ("length", lengths)):
            name = f"{kind}s-{len(shards):05d}.bin"
            (folder / name).write_bytes(np.concatenate(parts).data)  # tofile does not say what the system refuses
            entry |= {
                f"{kind}s": name,
                f"{kind}_bytes": (folder / name).stat().st_size,
                f"{kind}_sha256": sha256(folder / name),
            }
        shards.append(entry)
        tokens.clear()
        lengths.clear()

    total_tokens = total_sequences = 0
    tally = Tally()
    sequences = _rows if data.layout == "rows" else _lines
    for ids, lengths_here in progress(sequences(source, tokenizer, data, dtype, tally), f"tokenising {source.name}"):
        tokens.append(ids)
        lengths.append(lengths_here)
        total_tokens += len(ids)
        total_sequences += len(lengths_here)
        if sum(map(len, tokens)) >= TOKENS_PER_SHARD:
            flush()
    if tokens:
        flush()
    if not shards:
        if data.layout == "rows" and next(corpora.documents(source, data), None) is not None:
            raise UserError(
                f'the text "{source.name}" is shorter than one row of {data.max_length} tokens (data.max_length, --max-length)'
            )
        raise _empty(source, data, helps)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_json(
        folder / "manifest.json",
        {
            "name": source.name,
            "sequences": total_sequences,
            "tokens": total_tokens,
            "mean_length": total_tokens / total_sequences,
            "dtype": np.dtype(dtype).name,
            "max_length": data.max_length,
            "vocab_size": len(tokenizer),
            "text": asdict(tally),
            "recipe": recipe,
            "shards": shards,
        },
    )


Chunk = tuple[NDArray[Any], NDArray[np.uint16]]  # tokens of several sequences, end to end, and their lengths


def _lines(
    source: corpora.Source, tokenizer: PreTrainedTokenizerFast, data: DataConfig, dtype: Any, tally: Tally
) -> Iterator[Chunk]:
    """The Rust tokenizer spreads a chunk over all cores."""
    backend = tokenizer.backend_tokenizer.from_str(tokenizers.canonical(tokenizer))
    special = backend.num_special_tokens_to_add(is_pair=False)
    backend.enable_truncation(data.max_length)
    for lines in _read_ahead(corpora.usable_lines(source, data, tally), LINES_PER_CHUNK):
        encoded = backend.encode_batch_fast(lines)
        ids = [encoding.ids for encoding in encoded]
        lengths = np.fromiter(map(len, ids), dtype=np.uint16)
        # what is cut off comes in pieces of max_length, each with special tokens of its own
        beyond = [encoded[i].overflowing for i in np.flatnonzero(lengths == data.max_length)]
        cut = sum(len(piece) - special for pieces in beyond for piece in pieces)
        tally.lines_cut += sum(map(bool, beyond))
        tally.tokens_cut += cut
        tally.tokens += int(lengths.sum()) - special * len(lines) + cut
        yield np.fromiter(itertools.chain.from_iterable(ids), dtype=dtype), lengths


def _rows(
    source: corpora.Source, tokenizer: PreTrainedTokenizerFast, data: DataConfig, dtype: Any, tally: Tally
) -> Iterator[Chunk]:
    """What does not fill a last row is left out."""
    backend = tokenizer.backend_tokenizer.from_str(tokenizers.canonical(tokenizer))
    end, length = tokenizers.end_of_text(tokenizer), data.max_length
    left = np.empty(0, dtype=dtype)
    for texts in _read_ahead(corpora.documents(source, data, tally), DOCUMENTS_PER_CHUNK):
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        ids = np.fromiter(itertools.chain.from_iterable((*encoding.ids, end) for encoding in encoded), dtype=dtype)
        tally.tokens += len(ids)
        stream = np.concatenate((left, ids))
        count = len(stream) // length
        left = stream[count * length :]
        if count:
            yield stream[: count * length], np.full(count, length, dtype=np.uint16)
    tally.tokens_cut = len(left)


def _read_ahead(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    """Chunks of lines, read (and decompressed) on a thread while the tokenizer works."""
    chunks: queue.Queue[list[str] | BaseException | None] = queue.Queue(maxsize=CHUNKS_AHEAD)
    stopped = threading.Event()

    def put(item: list[str] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return chunks.put(item, timeout=0.2)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for chunk in iter(lambda: list(itertools.islice(lines, size)), []):
                if stopped.is_set():
                    return
                put(chunk)
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := chunks.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
