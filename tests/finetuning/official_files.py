"""Writes small files of the official forms, every task of both benchmarks."""

import json
from pathlib import Path

WORDS = ["the", "a", "hen", "dog", "cat", "good", "bad", "old", "red", "ran", "sat", "slept", "on", "under", "mat", "hat"]


def sentence(number: int) -> str:
    """A different one for each number. It has "good" in it if the number is odd, else "bad"."""
    state, chosen = number * 2654435761 % 2**32, []
    for _ in range(5):
        state = (state * 1103515245 + 12345) % 2**31
        chosen.append(WORDS[state // 65536 % len(WORDS)])
    words = [word for word in chosen if word not in ("good", "bad")]
    return " ".join(["the", *words, "good" if number % 2 else "bad", 'fox "'])  # quotes mean nothing in these files


def tsv(path: Path, header: list[str] | None, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows), encoding="utf-8")


def jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_glue(root: Path, train: int, dev: int) -> None:
    def files(folder, header, make, test_header, make_test):
        for file, first, count in (("train.tsv", 0, train), ("dev.tsv", 1000, dev)):
            tsv(root / folder / file, header, [make(i) for i in range(first, first + count)])
        tsv(root / folder / "test.tsv", test_header, [make_test(i) for i in range(7)])

    def pair(i):
        return [sentence(i), sentence(i + 5)]

    def entails(i):
        return "entailment" if i % 2 else "not_entailment"

    two = ["sentence1", "sentence2"]
    index = ["index"]
    files("CoLA", None, lambda i: ["gj04", str(i % 2), "", sentence(i)], [*index, "sentence"], lambda i: [str(i), sentence(i)])
    files("SST-2", ["sentence", "label"], lambda i: [sentence(i), str(i % 2)], [*index, "sentence"], lambda i: [str(i), "bad"])
    files(
        "MRPC",
        ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],  # the original file starts with a byte order mark
        lambda i: [str(i % 2), "1", "2", *pair(i)],
        ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        lambda i: [str(i), "1", "2", *pair(i)],
    )
    middle = ["genre", "filename", "year", "old_index", "source1", "source2"]
    files(
        "STS-B",
        [*index, *middle, *two, "score"],
        lambda i: [str(i), *middle, *pair(i), f"{(i % 2) * 4 + (i % 10) / 10:.3f}"],
        [*index, *middle, *two],
        lambda i: [str(i), *middle, *pair(i)],
    )
    files(
        "QQP",
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        lambda i: [str(i), "1", "2", *pair(i), str(i % 2)],
        ["id", "question1", "question2"],
        lambda i: [str(i), *pair(i)],
    )
    parses = [f"sentence{number}{kind}_parse" for kind in ("_binary", "") for number in (1, 2)]
    before = ["index", "promptID", "pairID", "genre", *parses]

    def mnli(i, labels):
        ours = ("entailment", "neutral", "contradiction")[i % 3]
        return [str(i), "1", "1e", "fiction", *["( ( a ) )"] * 4, *pair(i), *["neutral"] * labels, ours]

    tsv(root / "MNLI" / "train.tsv", [*before, *two, "label1", "gold_label"], [mnli(i, 1) for i in range(train)])
    for which in ("matched", "mismatched"):
        header = [*before, *two, *(f"label{number}" for number in range(1, 6)), "gold_label"]
        tsv(root / "MNLI" / f"dev_{which}.tsv", header, [mnli(i, 5) for i in range(1000, 1000 + dev)])
        tsv(root / "MNLI" / f"test_{which}.tsv", [*before, *two], [mnli(i, 0)[:-1] for i in range(7)])
    tsv(root / "diagnostic" / "diagnostic.tsv", [*index, *two], [[str(i), *pair(i)] for i in range(7)])
    files(
        "QNLI",
        ["index", "question", "sentence", "label"],
        lambda i: [str(i), *pair(i), entails(i)],
        ["index", "question", "sentence"],
        lambda i: [str(i), *pair(i)],
    )
    for folder in ("RTE", "WNLI"):
        files(
            folder,
            [*index, *two, "label"],
            lambda i, folder=folder: [str(i), *pair(i), entails(i) if folder == "RTE" else str(i % 2)],
            [*index, *two],
            lambda i: [str(i), *pair(i)],
        )


def write_superglue(root: Path, train: int, dev: int) -> None:
    def files(folder, make):
        for file, first, count in (("train", 0, train), ("val", 1000, dev), ("test", 2000, 7)):
            rows = [{**make(i), "idx": i - first} for i in range(first, first + count)]
            if file == "test":
                rows = [{key: value for key, value in row.items() if key != "label"} for row in rows]
            jsonl(root / folder / f"{file}.jsonl", rows)

    files("BoolQ", lambda i: {"question": sentence(i), "passage": sentence(i + 1), "label": bool(i % 2)})
    files(
        "CB",
        lambda i: {
            "premise": sentence(i),
            "hypothesis": sentence(i + 2),
            "label": ("entailment", "contradiction", "neutral")[i % 3],
        },
    )
    files(
        "COPA",
        lambda i: {
            "premise": sentence(i),
            "choice1": "the bad fox" if i % 2 else "the good fox",
            "choice2": "the good fox" if i % 2 else "the bad fox",
            "question": ("cause", "effect")[i % 3 == 0],
            "label": i % 2,
        },
    )
    files("WiC", lambda i: {"word": "fox", "sentence1": sentence(i), "sentence2": sentence(i + 2), "label": "ft"[i % 2] == "t"})
    spans = {"span1_text": "the", "span1_index": 0, "span2_text": "fox", "span2_index": 3}
    files("WSC", lambda i: {"text": sentence(i), "target": spans, "label": ("false", "true")[i % 2]})
    files(
        "RTE",
        lambda i: {"premise": sentence(i), "hypothesis": sentence(i), "label": ("not_entailment", "entailment")[i % 2]},
    )
    jsonl(root / "AX-b" / "AX-b.jsonl", [{"idx": str(i), "sentence1": "a", "sentence2": "b"} for i in range(7)])
    jsonl(root / "AX-g" / "AX-g.jsonl", [{"idx": i, "premise": "a", "hypothesis": "b"} for i in range(7)])
    for file, count in (("train", max(train // 4, 1)), ("val", max(dev // 4, 2)), ("test", 3)):
        passages = [
            {
                "idx": p,
                "passage": {
                    "text": sentence(p),
                    "questions": [
                        {
                            "question": "which fox ?",
                            "idx": 2 * p + q,
                            "answers": [
                                {
                                    "text": sentence(p + a),
                                    "idx": 10 * p + 5 * q + a,
                                    **({} if file == "test" else {"label": (p + a) % 2}),
                                }
                                for a in range(2 + q)
                            ],
                        }
                        for q in range(2)
                    ],
                },
            }
            for p in range(count)
        ]
        jsonl(root / "MultiRC" / f"{file}.jsonl", passages)
