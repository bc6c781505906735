"""Running text for decoders: documents end to end, an end-of-text token after each, cut into rows of one length."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pnn.config import DataConfig
from pnn.data.corpora import documents, open_source
from pnn.data.shards import prepare
from pnn.data.tokenizers import end_of_text, load_tokenizer
from pnn.errors import UserError

WIKIPEDIA = "= Fox =\nA fox is red.\nIt runs.\n\n= Owl =\nAn owl is grey.\n\nIt flies by night.\n"


def quiet(items, label):
    return items


def text_of(path, **settings):
    data = DataConfig(train=str(path), filter="none", layout="rows", **settings)
    return list(documents(open_source(str(path), data), data))


def test_an_article_begins_at_its_title(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKIPEDIA)
    assert text_of(path) == ["= Fox =\nA fox is red.\nIt runs.", "= Owl =\nAn owl is grey.\nIt flies by night."]


def test_wikitext_has_titles_and_sections_of_articles_stay_together(tmp_path):
    path = tmp_path / "wiki.raw"
    path.write_text(
        " \n = Robert = \n \n Robert is an actor . \n \n = = Career = = \n \n He acted . \n \n = Ann = \n \n Ann sings . \n"
    )
    assert text_of(path) == ["= Robert =\nRobert is an actor .\n= = Career = =\nHe acted .", "= Ann =\nAnn sings ."]


def test_without_titles_a_blank_line_ends_a_document(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("one\ntwo\n\n\nthree\n")
    assert text_of(path) == ["one\ntwo", "three"]


def test_a_record_is_a_document(tmp_path):
    path = tmp_path / "records.jsonl"
    texts = ("one\n\ntwo", "a sum:\n= 3 + 4 =\nseven", "three", "= Four =")  # neither blank lines nor titles matter there
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert text_of(path) == ["one\ntwo", *texts[1:]]


def test_a_title_may_be_one_letter_and_a_sum_is_no_title_in_plain_text(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text("= Fox =\nred\n\n= A =\na letter\n")
    assert text_of(path) == ["= Fox =\nred", "= A =\na letter"]
    path.write_text("a sum:\n= 3 + 4 =\nseven\n\nanother\n")
    assert text_of(path) == ["a sum:\n= 3 + 4 =\nseven", "another"]


def test_the_filter_drops_lines_of_documents(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKIPEDIA)
    data = DataConfig(train=str(path), filter="paper", layout="rows")
    assert list(documents(open_source(str(path), data), data)) == []  # none has 21 characters and five words


@pytest.mark.parametrize("length", [3, 7, 16])
def test_rows_are_the_text_cut_without_gaps(tmp_path, length, monkeypatch):
    monkeypatch.setattr("pnn.data.shards.DOCUMENTS_PER_CHUNK", 2)  # rows cross chunks
    path = tmp_path / "wiki.txt"
    path.write_text("\n\n".join(f"red fox {i}\nold owl {i}" for i in range(9)))
    data = DataConfig(
        train=str(path), validation=str(path), filter="none", layout="rows", max_length=length, prepared=str(tmp_path / "p")
    )
    prepared = prepare(data, quiet)
    tokenizer, tokens = prepared.tokenizer, prepared.train
    wanted = []
    for document in documents(open_source(str(path), data), data):
        wanted += [*tokenizer(document, add_special_tokens=False).input_ids, end_of_text(tokenizer)]
    rows = len(wanted) // length
    assert tokens.lengths.tolist() == [length] * rows
    assert tokens.take(np.arange(rows)).tolist() == wanted[: rows * length]


def test_lines_and_rows_of_one_text_are_two_sets(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text("\n\n".join(f"red fox {i} runs far" for i in range(40)))
    folders = {
        prepare(
            DataConfig(
                train=str(path), validation_sequences=3, filter="none", layout=layout, max_length=8, prepared=str(tmp_path)
            ),
            quiet,
        ).train.folder.name
        for layout in ("lines", "rows")
    }
    assert len(folders) == 2


def test_text_shorter_than_a_row_says_so(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a fox\n")
    with pytest.raises(UserError, match=r"shorter than one row of 512 tokens \(data.max_length"):
        prepare(DataConfig(train=str(path), filter="none", layout="rows", max_length=512, prepared=str(tmp_path)), quiet)


def test_gpt2s_tokenizer_file_knows_its_end_of_text(tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "?": 2}, unk_token="?"))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert end_of_text(load_tokenizer(str(tmp_path / "tokenizer.json"), 8)) == 0
    backend = Tokenizer(models.WordLevel({"a": 1, "?": 2}, unk_token="?"))
    backend.save(str(tmp_path / "bare.json"))
    with pytest.raises(UserError, match="neither an end-of-text token nor"):
        end_of_text(load_tokenizer(str(tmp_path / "bare.json"), 8))
