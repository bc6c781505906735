"""The rules that the benchmarks publish for submissions (gluebenchmark.com/faq, super.gluebenchmark.com/faq), written without
looking at what writes the files, and compared with what the benchmarks' own toolkit writes (github.com/nyu-mll/jiant:
jiant/evaluate.py of version 1, jiant/scripts/benchmarks/benchmarks.py of version 2)."""

import json

NUMBERS, ENTAILMENT = {"0", "1"}, {"entailment", "not_entailment"}
NLI = {"entailment", "neutral", "contradiction"}
GLUE_LABELS = {
    "CoLA.tsv": NUMBERS,
    "SST-2.tsv": NUMBERS,
    "MRPC.tsv": NUMBERS,
    "QQP.tsv": NUMBERS,
    "WNLI.tsv": NUMBERS,
    "STS-B.tsv": None,  # a number from 0 to 5
    "MNLI-m.tsv": NLI,
    "MNLI-mm.tsv": NLI,
    "AX.tsv": NLI,
    "QNLI.tsv": ENTAILMENT,
    "RTE.tsv": ENTAILMENT,
}
SUPERGLUE_LABELS = {
    "BoolQ.jsonl": {"true", "false"},
    "CB.jsonl": NLI,
    "COPA.jsonl": {0, 1},
    "RTE.jsonl": ENTAILMENT,
    "WiC.jsonl": {"true", "false"},
    "WSC.jsonl": {"True", "False"},
    "AX-b.jsonl": ENTAILMENT,
    "AX-g.jsonl": ENTAILMENT,
    "MultiRC.jsonl": {0, 1},
}


def check_glue(path, examples: int) -> None:
    header, *lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert header == "index\tprediction"
    assert len(lines) == examples
    for number, line in enumerate(lines):
        index, label = line.split("\t")
        assert index == str(number)
        allowed = GLUE_LABELS[path.name]
        assert label in allowed if allowed is not None else 0 <= float(label) <= 5


def check_superglue(path, examples: int) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    if path.name == "MultiRC.jsonl":
        assert len({row["idx"] for row in rows}) == len(rows)
        answers = []
        for row in rows:
            assert set(row) == {"idx", "passage"}
            assert set(row["passage"]) == {"questions"}
            for question in row["passage"]["questions"]:
                assert set(question) == {"idx", "answers"}
                answers += question["answers"]
        rows = answers
        assert len({answer["idx"] for answer in answers}) == len(answers)
    else:
        assert [row["idx"] for row in rows] == list(range(len(rows)))
    assert len(rows) == examples
    for row in rows:
        assert set(row) == {"idx", "label"}
        assert type(row["idx"]) is int
        assert any(row["label"] == label and type(row["label"]) is type(label) for label in SUPERGLUE_LABELS[path.name])


def check(path, examples: int) -> None:
    (check_glue if path.suffix == ".tsv" else check_superglue)(path, examples)
