"""Files of the official form become examples; files of another form are refused with what the form should be."""

import builtins
import shutil

import pytest

from pnn.errors import UserError
from pnn.finetuning.examples import read_hub, read_local
from pnn.finetuning.tasks import GROUPS, TASKS, parse_tasks


@pytest.fixture
def files(task_files, tmp_path):
    shutil.copytree(task_files, tmp_path / "tasks")
    return tmp_path / "tasks"


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_read_from_its_official_files(name, task_files):
    task = TASKS[name]
    data = read_local(task, task_files)
    assert len(data.train) >= 24
    assert set(data.dev) == set(task.dev)
    assert set(data.tests) == set(task.tests)
    for examples in (data.train, *data.dev.values()):
        assert {len(example.texts) for example in examples} == {task.choices or 1}
        labels = {example.label for example in examples}
        assert labels == set(range(len(task.labels))) or task.regression
    assert all(example.label is None for examples in data.tests.values() for example in examples)


def test_texts_of_the_tasks_with_a_form_of_their_own():
    row = {"text": "The cup fell because it was wet .", "span1_text": "The cup", "span1_index": 0, "span2_text": "it"}
    assert TASKS["wsc"].texts({**row, "span2_index": 4}) == (("* The cup * fell because # it # was wet .", None),)
    missed = {"text": "The cup fell because it was wet.", "span1_text": "the cup", "span1_index": 1, "span2_text": "wet"}
    # some indices of the official files miss the span by one word
    assert TASKS["wsc"].texts({**missed, "span2_index": 5}) == (("* The cup * fell because it was # wet. #", None),)
    elsewhere = {**missed, "span1_text": "a dog", "span1_index": 2}  # not in the text: where the index says
    assert TASKS["wsc"].texts({**elsewhere, "span2_index": 6}) == (("The cup * fell because * it was # wet. #", None),)
    copa = TASKS["copa"].texts({"premise": "I fell.", "choice1": "A.", "choice2": "B.", "question": "cause"})
    assert copa == (("I fell. What was the cause of this?", "A."), ("I fell. What was the cause of this?", "B."))
    wic = {"text": "Word: set. Sentence 1: A set . Sentence 2: Set it .", "label": 1}
    (flat,) = TASKS["wic"].flatten(wic)
    assert flat["label"] == "true"
    assert TASKS["wic"].texts(flat) == (("set : A set .", "Set it ."),)


def test_broken_lines_of_qqp_are_left_out_and_counted(files):
    path = files / "glue" / "QQP" / "train.tsv"
    path.write_text(path.read_text() + "24\t1\t2\ta question with\n a line break\tanother\t1\n")
    data = read_local(TASKS["qqp"], files)
    assert (len(data.train), data.broken_lines) == (24, 2)
    path = files / "glue" / "QQP" / "test.tsv"  # but no line of a test set may go: the server wants an answer to each
    path.write_text(path.read_text() + "7\ta question\n")
    with pytest.raises(UserError, match=r"test\.tsv, line 9: 2 columns, not 3; QQP has the columns question1, question2, id"):
        read_local(TASKS["qqp"], files)


@pytest.mark.parametrize(
    ("task", "file", "content", "says"),
    [
        ("cola", "glue/CoLA/train.tsv", "", ("train.tsv is empty", "source, label, mark, sentence")),
        ("sst2", "glue/SST-2/dev.tsv", "sentence\tlabel\n", ("dev.tsv is empty", "sentence, label")),
        ("sst2", "glue/SST-2/dev.tsv", "text\tlabel\na\t1\n", ('no column "sentence"', "sentence, label")),
        ("sst2", "glue/SST-2/dev.tsv", "sentence\tlabel\na\t1\nb\n", ("line 3", "1 columns, not 2")),
        ("sst2", "glue/SST-2/dev.tsv", "sentence\tlabel\na\tgood\n", ("line 2", "'good'", "SST-2 has 0, 1")),
        ("rte", "glue/RTE/train.tsv", "sentence1\tsentence2\tlabel\na\tb\tneutral\n", ("entailment, not_entailment",)),
        ("stsb", "glue/STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\thigh\n", ("line 2", "'high'", "0 to 5")),
        ("stsb", "glue/STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\t50\n", ("line 2", "'50'", "0 to 5")),
        ("boolq", "superglue/BoolQ/val.jsonl", '{"question": "a", "label": true}\n', ("line 1", '"passage"', "question")),
        ("boolq", "superglue/BoolQ/val.jsonl", "question\n", ("line 1", "not JSON")),
        ("boolq", "superglue/BoolQ/val.jsonl", "[1]\n", ("line 1", "not an object")),
        ("boolq", "superglue/BoolQ/val.jsonl", '{"question": "a", "passage": 5, "label": true}\n', ('"passage" is 5',)),
        ("cb", "superglue/CB/val.jsonl", '{"premise": ["a"], "hypothesis": "b", "label": "neutral"}\n', ("['a'], not a text",)),
        ("copa", "superglue/COPA/val.jsonl", '{"premise": "a", "choice1": "b", "choice2": "c", "question": ["x"], "label": 0}',
         ('"question" is', "not a text")),
        ("wsc", "superglue/WSC/val.jsonl", '{"text": "a b", "target": {"span1_text": 4, "span1_index": 0, '
         '"span2_text": "b", "span2_index": 1}, "label": "true"}\n', ('"span1_text" is 4', "not a text")),
        ("multirc", "superglue/MultiRC/val.jsonl", '{"idx": 0, "passage": "a"}\n', ("line 1 is not built like MultiRC's",)),
        ("boolq", "superglue/BoolQ/val.jsonl", "", ("empty", "passage, question")),
        ("multirc", "superglue/MultiRC/val.jsonl", '{"idx": 0, "passage": {"text": "a"}}\n', ("line 1", "'questions'")),
        ("copa", "superglue/COPA/val.jsonl", '{"premise": "a", "choice1": "b", "choice2": "c", "question": "why", "label": 0}',
         ("line 1", "'why'", "cause")),
        ("wsc", "superglue/WSC/val.jsonl", '{"text": "a b", "target": {"span1_text": "a", "span1_index": 9, '
         '"span2_text": "b", "span2_index": 1}, "label": "true"}\n', ("line 1", "span1_index is 9", "2 words")),
        ("cola", "glue/CoLA/dev.tsv", b"gj04\t1\t\t\xff\xfe\n", ("dev.tsv is not valid UTF-8",)),
    ],
)  # fmt: skip
def test_a_file_of_another_form(files, task, file, content, says):
    (files / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_local(TASKS[task], files)
    for text in says:
        assert text in str(error.value)


def test_files_that_are_not_there(files, tmp_path):
    (files / "glue" / "CoLA" / "train.tsv").unlink()
    with pytest.raises(UserError, match=r"train\.tsv is missing: cola needs CoLA/train\.tsv and dev\.tsv"):
        read_local(TASKS["cola"], files)
    with pytest.raises(UserError, match="no such folder"):
        read_local(TASKS["cola"], tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no MRPC/train\.tsv and dev\.tsv"):
        read_local(TASKS["mrpc"], tmp_path / "empty")
    (files / "glue" / "RTE" / "test.tsv").unlink()  # a test set may be absent
    assert read_local(TASKS["rte"], files).tests == {}


def test_the_two_tasks_called_rte_are_told_apart(files):
    glue, superglue = (read_local(TASKS[name], files) for name in ("rte", "superglue_rte"))
    assert glue.train[0].texts[0][0] != glue.train[0].texts[0][1]
    assert superglue.train[0].texts[0][0] == superglue.train[0].texts[0][1]  # as these files were made


def test_names_of_tasks():
    assert parse_tasks("CoLA, sts-b") == (["cola", "stsb"], False)
    assert parse_tasks("all") == (list(TASKS), True)
    assert len(GROUPS["glue"]) == 9
    assert len(GROUPS["superglue"]) == 7
    with pytest.raises(UserError, match=r'no task "colla".*did you mean "cola"'):
        parse_tasks("colla")
    with pytest.raises(UserError, match="name tasks separated by commas"):
        parse_tasks(" , ")


class TestHub:
    """The hub's form: other columns' names, labels as numbers."""

    def load(self, monkeypatch, splits, features):
        import datasets

        self.asked = []

        def load_dataset(repository, name):
            self.asked.append((repository, name))
            if name in ("ax", "axb", "axg"):
                raise ConnectionError("not in the cache")
            kinds = datasets.Features(features)
            return {split: datasets.Dataset.from_dict(columns, features=kinds) for split, columns in splits.items()}

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def test_labels_by_name_and_by_number(self, monkeypatch):
        from datasets import ClassLabel, Value

        text, index = Value("string"), Value("int32")
        rows = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [2, 0], "idx": [0, 1]}
        splits = {f"{split}_{which}": rows for split in ("validation", "test") for which in ("matched", "mismatched")}
        names = ClassLabel(names=["entailment", "neutral", "contradiction"])
        self.load(monkeypatch, {"train": rows, **splits}, {"premise": text, "hypothesis": text, "label": names, "idx": index})
        data = read_hub(TASKS["mnli"])
        assert self.asked == [("nyu-mll/glue", "mnli"), ("nyu-mll/glue", "ax")]
        assert [(one.texts, one.label) for one in data.train] == [((("a", "c"),), 2), ((("b", "d"),), 0)]
        assert set(data.tests) == {"MNLI-m", "MNLI-mm"}  # a diagnostic set may be absent

        rows = {"sentence": ["a", "b"], "label": [1, 0], "idx": [0, 1]}
        names = ClassLabel(names=["unacceptable", "acceptable"])
        splits = dict.fromkeys(("train", "validation", "test"), rows)
        self.load(monkeypatch, splits, {"sentence": text, "label": names, "idx": index})
        data = read_hub(TASKS["cola"])
        assert [one.label for one in data.dev["dev"]] == [1, 0]
        assert [one.label for one in data.tests["CoLA"]] == [None, None]

    @pytest.mark.parametrize(("task", "diagnostics"), [("mnli", ["AX"]), ("superglue_rte", ["AX-g", "AX-b"])])
    def test_diagnostic_sets_are_data_sets_of_their_own(self, monkeypatch, task, diagnostics):
        import datasets

        def load_dataset(_, name):
            first, second = ("sentence1", "sentence2") if name == "axb" else ("premise", "hypothesis")
            rows = {first: [name, "b"], second: ["c", "d"], "label": [0, 1], "idx": [0, 1]}
            text, names = datasets.Value("string"), datasets.ClassLabel(names=list(TASKS[task].labels))
            kinds = {first: text, second: text, "label": names, "idx": datasets.Value("int32")}
            splits = ["test"] if name in ("ax", "axb", "axg") else ["train", *TASKS[task].hub_splits().values()]
            return {split: datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)) for split in splits}

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        data = read_hub(TASKS[task])
        assert set(data.tests) == set(TASKS[task].tests)
        for one in diagnostics:
            hub = one.lower().replace("-", "")
            assert [(row.index, row.texts, row.label) for row in data.tests[one]] == [
                (0, ((hub, "c"),), None),
                (1, (("b", "d"),), None),
            ]

    def test_without_the_package_or_the_hub(self, monkeypatch):
        real = builtins.__import__

        def no_datasets(name, *rest, **more):
            if name == "datasets":
                raise ImportError(name)
            return real(name, *rest, **more)

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", no_datasets)
            with pytest.raises(UserError, match=r"needs the package datasets.*--data"):
                read_hub(TASKS["cola"])
        import datasets

        def unreachable(*_):
            raise ConnectionError("no network")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        with pytest.raises(UserError, match=r"cannot load nyu-mll/glue cola from the hub .no network.: give local files"):
            read_hub(TASKS["cola"])
