"""Every way to give text yields the same lines; every way to get it wrong is one sentence that names the file."""

from __future__ import annotations

import gzip
import json
import lzma

import datasets
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from beside import DATA

from pnn.config import DataConfig
from pnn.data import corpora, synthetic
from pnn.data.corpora import open_source, passes_paper_filter, undo_wikitext_marks, usable_lines
from pnn.data.shards import prepare, prepare_source
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError

LINES = [
    "The first paragraph, with an é and a 漢字 in it.",
    "A second one that is a little longer than the first.",
    "  And a third, indented, with trailing space.  ",
    "The last of these four paragraphs ends here.",
]
STRIPPED = [line.strip() for line in LINES]


def jsonl(lines, column="text"):
    return "".join(json.dumps({"id": i, column: line}) + "\n" for i, line in enumerate(lines))


def write_parquet(path, **columns):
    parquet.write_table(arrow.table(columns), path)


def lines_of(name, **settings):
    return list(usable_lines(open_source(str(name), DataConfig(**settings)), DataConfig(**settings)))


def error_of(name, **settings):
    """The sentence that reading this source ends in."""
    with pytest.raises(UserError) as caught:
        lines_of(name, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Formats --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.txt", lambda path, text: path.write_text(text, encoding="utf-8")),
        ("a.raw", lambda path, text: path.write_text(text.replace("\n", "\r\n"), encoding="utf-8", newline="")),
        ("a.tokens", lambda path, text: path.write_text(text, encoding="utf-8")),
        ("a.txt.xz", lambda path, text: path.write_bytes(lzma.compress(text.encode()))),
        ("a.txt.gz", lambda path, text: path.write_bytes(gzip.compress(text.encode()))),
        ("a.jsonl", lambda path, text: path.write_text(jsonl(text.splitlines()), encoding="utf-8")),
        ("a.jsonl.xz", lambda path, text: path.write_bytes(lzma.compress(jsonl(text.splitlines()).encode()))),
        ("a.jsonl.gz", lambda path, text: path.write_bytes(gzip.compress(jsonl([text]).encode()))),  # one record, many lines
        ("a.parquet", lambda path, text: write_parquet(path, text=text.splitlines(), id=[1, 2, 3, 4])),
        ("b.parquet", lambda path, text: write_parquet(path, text=[text, None, ""])),
        ("without_suffix", lambda path, text: path.write_text(text, encoding="utf-8")),
    ],
)
def test_every_format_gives_the_same_lines(name, make, tmp_path):
    make(tmp_path / name, "\n".join(LINES))
    assert lines_of(tmp_path / name) == STRIPPED


def test_a_glob_and_a_folder_give_all_files_in_order(tmp_path):
    for number, line in enumerate(LINES[:2]):
        (tmp_path / f"{number}.txt").write_text(line, encoding="utf-8")
    (tmp_path / "2.txt.gz").write_bytes(gzip.compress(LINES[2].encode()))
    write_parquet(tmp_path / "3.parquet", text=LINES[3:])
    assert lines_of(tmp_path) == STRIPPED
    assert lines_of(tmp_path / "*") == STRIPPED
    assert lines_of(tmp_path / "?.txt") == STRIPPED[:2]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "0.txt").write_text(LINES[0], encoding="utf-8")
    assert lines_of(f"{tmp_path}/**/0.txt") == [STRIPPED[0]] * 2


def test_another_column_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl(LINES, "body"), encoding="utf-8")
    write_parquet(tmp_path / "a.parquet", body=LINES)
    for name in ("a.jsonl", "a.parquet"):
        assert lines_of(tmp_path / name, text_column="body") == STRIPPED


def test_the_identity_of_files_is_their_content_not_their_place(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(LINES[0], encoding="utf-8")
    one, two = (open_source(str(tmp_path / folder / "a.txt"), DataConfig()).identity for folder in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "a.txt").write_text(LINES[1], encoding="utf-8")
    assert open_source(str(tmp_path / "two" / "a.txt"), DataConfig()).identity != one


def test_the_embedded_corpus_is_a_source_of_its_paragraphs():
    assert lines_of("synthetic", synthetic_paragraphs=7) == list(synthetic.paragraphs(7, seed=0))
    identities = [open_source("synthetic", DataConfig(synthetic_paragraphs=n)).identity for n in (7, 7, 8)]
    assert identities[0] == identities[1] != identities[2]


def test_the_harder_embedded_corpus_is_another_one():
    hard = lines_of("synthetic_hard", synthetic_paragraphs=7)
    assert hard == list(synthetic.paragraphs(7, 0, "synthetic_hard"))
    assert not set(hard) & set(lines_of("synthetic", synthetic_paragraphs=7))
    one, other = (open_source(name, DataConfig(synthetic_paragraphs=7)).identity for name in synthetic.RULES)
    assert one != other


# Filter and marks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("", False),
        ("   \n", False),
        ("one two three four fi", True),  # 21 characters, 5 words
        ("one two three four 5", False),  # 20 characters
        ("one-and-a-very-long word three four", False),  # 4 words
        ("  a b c d e              \n", False),  # white space around does not count
        (" = Robert Boulter = \n", False),
        ("a b c d " + "e" * 13, True),
    ],
)
def test_the_papers_filter(line, passes):
    assert bool(passes_paper_filter(line)) is passes


def test_the_filter_can_be_switched_off(tmp_path):
    (tmp_path / "a.txt").write_text("short\n\n  \nthis line is long enough to pass\n", encoding="utf-8")
    assert lines_of(tmp_path / "a.txt") == ["this line is long enough to pass"]
    assert lines_of(tmp_path / "a.txt", filter="none") == ["short", "this line is long enough to pass"]


@pytest.mark.parametrize("name", ["wiki.valid.raw", "wiki.valid.tokens"])
def test_2188_lines_of_wikitext_103_valid_pass_the_filter(name):
    file = DATA / "wikitext-103" / name
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    lines = lines_of(file)
    assert len(lines) == 2188
    assert any(" @-@ " in line for line in lines)
    undone = lines_of(file, undo_wikitext_marks=True)
    assert len(undone) == 2188
    assert not any(mark in line for line in undone for mark in (" @-@ ", " @,@ ", " @.@ ", " , "))


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("1 @,@ 000 , a well @-@ known ( old ) city 's", "1,000, a well-known (old) city's"),
        ("3 @.@ 5 % of them", "3.5% of them"),
        ("He did n't go ; they 're here .", "He didn't go; they're here."),
        ("It cost $ 5 : cheap !", "It cost $5: cheap!"),
        ("nothing to do here.", "nothing to do here."),
        ('he said " yes "', 'he said " yes "'),
        ("a @-@ b @-@ c", "a-b-c"),
    ],
)
def test_wikitext_marks_are_undone(marked, plain):
    assert undo_wikitext_marks(marked) == plain


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("the ( old ) , city", "the (old), city"),
        ("the ( old ) .", "the (old)."),
        ("the city 's , and", "the city's, and"),
        ("5 % , then", "5%, then"),
        ("( so ) it was", "(so) it was"),
        ("it cost ( $ 5 ) then", "it cost ($5) then"),
    ],
)
def test_wikitext_marks_beside_each_other_are_undone(marked, plain):
    assert undo_wikitext_marks(marked) == plain


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing.txt", "nothing.jsonl.xz", "no*thing", "folder"])
def test_a_missing_file_is_named(name, tmp_path):
    (tmp_path / "folder").mkdir()
    assert f'no corpus file matches "{tmp_path / name}"' in error_of(tmp_path / name)
    assert ("neither token shards nor .txt" in error_of(tmp_path / name)) == (name == "folder")


@pytest.mark.parametrize("text", ["", "\n\n\n", "too short\n"])
def test_an_empty_corpus_is_named(text, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text(text, encoding="utf-8")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", encoding="utf-8")
    data = DataConfig(train=str(file), tokenizer=str(vocabulary), prepared=str(tmp_path / "prepared"))
    with pytest.raises(UserError) as caught:
        prepare(data, lambda items, label: items)
    assert str(caught.value) == (
        f'the text "{file}" is empty or too short: no line has more than 20 characters and at least 5 words; '
        "--set data.filter=none takes every line with text"
    )
    assert not any((tmp_path / "prepared").iterdir())


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_a_line_of_ten_million_characters_is_refused(suffix, tmp_path):
    file = tmp_path / f"a.{suffix}"
    lines = [LINES[0], "word " * 2_000_000]
    if suffix == "parquet":
        write_parquet(file, text=lines)
    else:
        file.write_text(jsonl(lines) if suffix == "jsonl" else "\n".join(lines), encoding="utf-8")
    message = error_of(file)
    assert message.startswith(f"{file}: line 2 has 10,000,000 characters")


def test_invalid_utf8_is_named_by_line_and_byte(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"good line\nbad \xff line\n")
    assert error_of(file) == f"{file}: line 2 is not valid UTF-8 (byte 4 of the line)"


def test_broken_json_is_named_by_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(jsonl(LINES[:2]) + '{"text": "cut\n', encoding="utf-8")
    assert error_of(file).startswith(f"{file}: line 3 is not JSON")


@pytest.mark.parametrize("record", ['["a list"]', '{"text": 5}', '{"other": "text"}', "3"])
def test_a_json_line_without_the_column_is_named(record, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(jsonl(LINES[:1]) + record + "\n", encoding="utf-8")
    assert error_of(file) == f'{file}: line 2 has no text under "text" (set data.text_column)'


def test_a_parquet_file_without_the_column_suggests_one(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, texts=LINES, id=[1, 2, 3, 4])
    assert error_of(file) == f'{file}: no column "text" (set data.text_column) (did you mean "texts"?)'


def test_what_is_no_parquet_file_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 and then nothing of the kind PAR0")
    assert error_of(file).startswith(f"{file}: not a parquet file")


def test_a_parquet_column_of_numbers_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, text=[1, 2, 3])
    assert error_of(file) == f'{file}: the column "text" holds int, not text (set data.text_column)'


def test_a_parquet_column_that_is_no_utf8_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    broken = arrow.array([b"fine", b"\xff\xfe"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": broken}), file)
    assert error_of(file) == f'{file}: the column "text" is not valid UTF-8'


def test_token_shards_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    data = DataConfig(filter="none", prepared=str(tmp_path), max_length=32, vocab_size=100)
    tokenizer = of_synthetic_language(32)
    prepare_source(open_source(str(tmp_path / "text.txt"), data), tokenizer, data, lambda lines, *_: lines)
    (shards,) = (path.parent for path in tmp_path.glob("*/manifest.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_source(f"~/{shards.name}", data).shards == shards


def test_a_file_may_have_brackets_in_its_name(tmp_path):
    (tmp_path / "text[1].txt").write_text("\n".join(LINES), encoding="utf-8")
    assert lines_of(tmp_path / "text[1].txt", filter="none") == STRIPPED


@pytest.mark.parametrize(("suffix", "compress"), [("xz", lzma.compress), ("gz", gzip.compress)])
def test_a_compressed_file_that_is_cut_short_is_named(suffix, compress, tmp_path):
    file = tmp_path / f"a.txt.{suffix}"
    whole = compress("".join(f"{LINES[0]} {i * 7919 % 1013}\n" for i in range(2000)).encode())
    file.write_bytes(whole[: len(whole) // 2])
    assert error_of(file).startswith(f"{file}: the compressed file is damaged or cut short")
    file.write_bytes(b"this was never compressed")
    assert error_of(file).startswith(f"{file}: the compressed file is damaged or cut short")


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_a_compressed_file_that_is_damaged_is_named(suffix, tmp_path):
    file = tmp_path / f"a.txt.{suffix}"
    whole = bytearray(
        (lzma if suffix == "xz" else gzip).compress("".join(f"line {i} {i * 7919 % 1013}\n" for i in range(2000)).encode())
    )
    for at in range(200, 1200, 50):
        whole[at] ^= 0xFF
    file.write_bytes(whole)
    assert error_of(file).startswith(f"{file}: the compressed file is damaged or cut short")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text(LINES[0], encoding="utf-8")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(corpora, "_open_binary", refuse)  # root, who may run this, is never refused
    assert error_of(file) == f"{file}: no permission to read it"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("wikitext103", '(did you mean "wikitext-103"?)'), ("syntetic", '(did you mean "synthetic"?)'), ("qqq", "(known: bookc")],
)
def test_an_unknown_corpus_name_gets_a_suggestion(name, suggestion):
    message = error_of(name)
    assert message.startswith(f'no corpus "{name}": not a file, and not a known name')
    assert suggestion in message


# The hub (out of reach here: load_dataset is replaced) ----------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """What load_dataset was asked for; it answers with a real dataset."""
    calls = []

    def load_dataset(name, configuration, split, streaming):
        calls.append((name, configuration, split, streaming))
        table = datasets.Dataset.from_dict({"text": [*LINES, "\n".join(LINES)], "id": [1, 2, 3, 4, 5]})
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("wikitext-103", ("Salesforce/wikitext", "wikitext-103-raw-v1")),
        ("wikitext-2", ("Salesforce/wikitext", "wikitext-2-raw-v1")),
        ("owner/name", ("owner/name", None)),
        ("owner/name:some", ("owner/name", "some")),
    ],
)
def test_a_hub_name_is_read_through_datasets(hub, name, asked):
    data = DataConfig()
    for split in ("train", "validation"):
        source = open_source(name, data, split)
        assert hub == []  # nothing is loaded before it is read
        assert list(usable_lines(source, data)) == STRIPPED * 2
        assert hub.pop() == (*asked, split, False)
    assert open_source(name, data, "train").identity != open_source(name, data, "validation").identity


def test_large_corpora_are_streamed_up_to_twice_the_sequences_asked_for(hub):
    assert lines_of("c4", max_sequences=1) == STRIPPED[:2]
    assert hub == [("allenai/c4", "en", "train", True)]


@pytest.mark.parametrize("name", ["c4", "bookcorpus"])
def test_large_corpora_need_a_limit(hub, name):
    assert error_of(name) == f'"{name}" is too large to read whole: set data.max_sequences'
    assert hub == []


def test_a_hub_dataset_without_the_column_suggests_one(hub):
    assert error_of("owner/name", text_column="texts") == '"owner/name" has no column "texts" (did you mean "text"?)'


def test_a_hub_that_cannot_be_reached_is_a_user_error(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nand a long story after it")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert error_of("wikitext-103") == 'cannot read "wikitext-103" from the hub: Couldn\'t reach the hub'


def test_a_real_hub_name_offline_is_a_user_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert error_of("nobody/no-such-dataset").startswith('cannot read "nobody/no-such-dataset" from the hub: ')
