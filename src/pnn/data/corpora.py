"""Where text comes from: the embedded corpus, local files, or a dataset of the Hugging Face hub.

A source yields lines (paragraphs) of text and says what it is, so that token shards made from it can be found again. Where
text comes in records, a mark of its own ends each.
"""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pnn.config import DataConfig
from pnn.data import synthetic
from pnn.data.tally import Tally
from pnn.errors import UserError, did_you_mean, first_line
from pnn.files import sha256

HUB = {  # short name → (dataset, configuration, streamed because too large to download whole)
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-raw-v1", False),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", False),
    "bookcorpus": ("bookcorpus/bookcorpus", None, True),
    "c4": ("allenai/c4", "en", True),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", True),
}
SUFFIXES = (".txt", ".jsonl", ".parquet", ".tokens", ".raw")
MANIFEST = "manifest.json"  # of a folder of token shards
RECORD_END = "\x1e"  # white space to everything that reads lines
LONGEST_LINE = 1_000_000  # characters; a longer "line" is a file without line breaks, not a paragraph


@dataclass(frozen=True)
class Source:
    name: str
    identity: dict[str, Any]  # what the text is, for fingerprints
    lines: Callable[[], Iterator[str]]
    records: bool = False  # whether lines come in records, each ended by RECORD_END
    shards: Path | None = None  # where its tokens are, of a text that is here as tokens alone

    @property
    def stem(self) -> str:
        """What its folder of token shards begins with: its file's name, or that of the first folder above it of which letters
        remain (`wiki/*.txt` → wiki)."""
        plain = ("".join(c if c.isalnum() or c in "-_" else "-" for c in p.split(".")[0]) for p in Path(self.name).parts[::-1])
        return next((stem for name in plain if (stem := name.lstrip("-"))), "text")


def open_source(name: str, data: DataConfig, split: str = "train") -> Source:
    if name in synthetic.RULES:
        identity = {"synthetic": data.synthetic_paragraphs, "language": synthetic.fingerprint(name)}
        return Source(name, identity, lambda: _records(synthetic.paragraphs(data.synthetic_paragraphs, 0, name)), True)
    if (Path(name).expanduser() / MANIFEST).is_file():
        return _as_tokens(Path(name).expanduser())
    if _looks_like_files(name):
        files = _find_files(name)
        identity = {"files": [[file.name, sha256(file)] for file in files], "column": data.text_column}
        records = all(_plain_name(file.name).endswith((".jsonl", ".parquet")) for file in files)
        return Source(name, identity, lambda: _file_lines(files, data.text_column), records)
    if name not in HUB and "/" not in name:
        raise UserError(f'no corpus "{name}": not a file, and not a known name{did_you_mean(name, [*HUB, *synthetic.RULES])}')
    return _hub_source(name, data, split)


def _as_tokens(folder: Path) -> Source:
    """A folder of token shards: the text itself need not be here."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        name, identity = manifest["name"], manifest["recipe"]["source"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / MANIFEST} is not that of token shards: name the text files beside it, or remove it"
        ) from None

    def no_lines() -> Iterator[str]:
        raise UserError(f"{folder} holds other tokens than the config asks for: give the text that they were made from")

    return Source(name, identity, no_lines, shards=folder)


def _records(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.splitlines()
        yield RECORD_END


# Local files ----------------------------------------------------------------------------------------------------------


def _looks_like_files(name: str) -> bool:
    named = _plain_name(name).endswith(SUFFIXES)
    return Path(name).exists() or any(c in name for c in "*?[") or named or name.startswith((".", "/", "~"))


def _plain_name(name: str) -> str:
    """Without the suffix of a compressed file."""
    return name.removesuffix(".xz").removesuffix(".gz")


def _find_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        names = [str(p) for p in path.iterdir() if _plain_name(p.name).endswith(SUFFIXES)]
    else:
        names = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)  # a file's name may have brackets
    files = sorted(Path(n) for n in names if Path(n).is_file())
    if not files:
        why = f": the folder holds neither token shards nor {', '.join(SUFFIXES)} files" if path.is_dir() else ""
        raise UserError(f'no corpus file matches "{pattern}"{why}')
    return files


def _open_binary(file: Path) -> IO[bytes]:
    if file.suffix == ".xz":
        return lzma.open(file)
    if file.suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    return open(file, "rb")


def _file_lines(files: list[Path], column: str) -> Iterator[str]:
    for file in files:
        plain = _plain_name(file.name)
        try:
            if plain.endswith(".parquet"):
                yield from _parquet_lines(file, column)
            else:
                with _open_binary(file) as stream:
                    yield from text_lines(stream, file, column if plain.endswith(".jsonl") else None)
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{file}: the compressed file is damaged or cut short ({error})") from None
        except PermissionError:
            raise UserError(f"{file}: no permission to read it") from None


def text_lines(stream: IO[bytes], file: Path | str, column: str | None = None) -> Iterator[str]:
    """The lines of an open file; `file` is its name in errors, `column` the key that holds the text if it is JSON lines."""
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: line {number} is not valid UTF-8 (byte {error.start} of the line)") from None
        if column is not None and line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{file}: line {number} is not JSON ({error.msg})") from None
            if not isinstance(record, dict) or not isinstance(record.get(column), str):
                raise UserError(f'{file}: line {number} has no text under "{column}" (set data.text_column)')
            for part in _records([record[column]]):
                yield _checked(part, file, number)
        else:
            yield _checked(line, file, number)


def _checked(line: str, file: Path | str, number: int) -> str:
    if len(line) > LONGEST_LINE:
        raise UserError(
            f"{file}: line {number} has {len(line):,} characters, more than the {LONGEST_LINE:,} taken "
            "(put one paragraph on a line)"
        )
    return line


def _parquet_lines(file: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: reading .parquet needs the package pyarrow") from None
    try:
        table = parquet.ParquetFile(file)
    except arrow.ArrowInvalid as error:
        raise UserError(f"{file}: not a parquet file ({error})") from None
    names = table.schema_arrow.names
    if column not in names:
        raise UserError(f'{file}: no column "{column}" (set data.text_column){did_you_mean(column, names)}')
    row = 0
    for batch in table.iter_batches(columns=[column]):
        try:
            texts = batch.column(0).to_pylist()
        except UnicodeDecodeError:
            raise UserError(f'{file}: the column "{column}" is not valid UTF-8') from None
        for text in texts:
            row += 1
            if text is not None and not isinstance(text, str):
                raise UserError(f'{file}: the column "{column}" holds {type(text).__name__}, not text (set data.text_column)')
            for part in _records([text or ""]):
                yield _checked(part, file, row)


# The hub --------------------------------------------------------------------------------------------------------------


def _hub_source(name: str, data: DataConfig, split: str) -> Source:
    """`owner/name` or `owner/name:configuration`, or a short name. Large ones are streamed up to `max_sequences` lines."""
    if name in HUB:
        dataset, configuration, streamed = HUB[name]
    else:
        dataset, _, configuration = name.partition(":")
        streamed = False
    if streamed and data.max_sequences is None:
        raise UserError(f'"{name}" is too large to read whole: set data.max_sequences')
    # twice as many lines as sequences asked for, since a filter drops some
    wanted = data.max_sequences if split == "train" else data.validation_sequences
    limit = 2 * wanted if streamed and wanted else None

    records = dataset != HUB["wikitext-103"][0]  # a row of WikiText is a line of an article

    def lines() -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise UserError(f'"{name}" is a hub dataset; reading it needs the package datasets') from None
        try:
            rows = load_dataset(dataset, configuration or None, split=split, streaming=streamed)
            for index, row in enumerate(rows):
                if limit is not None and index >= limit:
                    return
                if data.text_column not in row:
                    raise UserError(f'"{name}" has no column "{data.text_column}"{did_you_mean(data.text_column, row)}')
                text = row[data.text_column] or ""
                yield from (_records([text]) if records else text.splitlines() or [""])
        except UserError:
            raise
        except Exception as error:  # the hub client raises many kinds: offline, unknown name, unknown split
            raise UserError(f'cannot read "{name}" from the hub: {first_line(error)}') from error

    identity = {"hub": dataset, "configuration": configuration, "split": split, "column": data.text_column, "limit": limit}
    return Source(name, identity, lines, records)


# What becomes of a line -----------------------------------------------------------------------------------------------


def passes_paper_filter(line: str) -> bool:
    """The paper's filter: more than 20 characters and at least 5 words. It leaves 2,188 lines of WikiText-103 valid."""
    line = line.strip()
    return len(line) > 20 and len(line.split()) >= 5


def undo_wikitext_marks(line: str) -> str:
    """WikiText's spacing turned back into plain text: "1 @,@ 000 , a well @-@ known ( old ) city 's" →
    "1,000, a well-known (old) city's". Quotation marks stay spaced: their side cannot be told."""
    line = re.sub(r" @([-,.])@ ", r"\1", line)
    line = re.sub(r" ([,.;:!?)%]|'s|n't|'re|'ve|'ll|'d|'m)(?=\s|$)", r"\1", line)
    return re.sub(r"(?<!\S)([($£]) ", r"\1", line)


def _usable(line: str, data: DataConfig, tally: Tally) -> str | None:
    """What becomes of a stripped line; None if the filter drops it."""
    tally.lines += bool(line)
    if not (passes_paper_filter(line) if data.filter == "paper" else line):
        tally.lines_filtered += bool(line)
        return None
    return undo_wikitext_marks(line) if data.undo_wikitext_marks else line


def usable_lines(source: Source, data: DataConfig, tally: Tally | None = None) -> Iterator[str]:
    """The lines that become sequences: stripped, filtered, and with WikiText's marks undone if asked for."""
    tally = tally or Tally()
    for line in source.lines():
        usable = _usable(line.strip(), data, tally)
        if usable is not None:
            yield usable


def documents(source: Source, data: DataConfig, tally: Tally | None = None) -> Iterator[str]:
    """Running text: the same lines, joined to documents. A record is a document. In plain text that begins with a title line
    (Wikipedia's and WikiText's "= Title =") a document begins at every title, in other text after a blank line."""
    tally = tally or Tally()
    lines: list[str] = []
    titled: bool | None = None
    for raw in source.lines():
        line = raw.strip()
        is_title = re.fullmatch(r"= [^=](.*[^=])? =", line) is not None
        if titled is None and line:
            titled = is_title
        ends = raw == RECORD_END or (not source.records and (is_title if titled else not line))
        if ends and lines:
            yield "\n".join(lines)
            lines = []
        usable = _usable(line, data, tally)
        if usable is not None:
            lines.append(usable)
    if lines:
        yield "\n".join(lines)
