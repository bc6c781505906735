"""The bag of words is scikit-learn's logistic regression, and the majority what it says."""

import numpy as np
import pytest
from official_files import WORDS

from pnn.finetuning.baselines import BagOfWords, baselines, features
from pnn.finetuning.examples import Example, TaskData, read_local
from pnn.finetuning.tasks import TASKS


def data_of(task, examples):
    return TaskData(TASKS[task], examples, {"dev": examples}, {}, "made here", {})


def test_features_say_which_text_a_word_is_of():
    assert features(("The fox!", "a fox")) == ["a !", "a fox", "a the", "b a", "b fox", "both fox"]
    assert features(("fox", None)) == ["a fox"]


def test_it_equals_scikit_learns_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed (pip install -e '.[dev]')")
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, 6)) for _ in range(150)]
    labels = generator.integers(0, 3, 150)
    words = BagOfWords(data_of("cb", [Example(i, ((text, "x"),), int(labels[i])) for i, text in enumerate(texts)]))
    matrix = np.zeros((150, len(words.vocabulary)))
    for row, text in enumerate(texts):
        matrix[row, [words.vocabulary[word] for word in features((text, "x"))]] = 1
    theirs = linear_model.LogisticRegression(C=1.0, tol=1e-8, max_iter=2000).fit(matrix, labels)
    ours = matrix @ words.weights.numpy() + words.bias.numpy()
    probabilities = np.exp(ours - ours.max(1, keepdims=True))
    np.testing.assert_allclose(probabilities / probabilities.sum(1, keepdims=True), theirs.predict_proba(matrix), atol=1e-3)


def test_majority_regression_and_choices(task_files):
    def sets(data):
        return {name: {"labels": np.array([one.label for one in dev], dtype=float)} for name, dev in data.dev.items()}

    examples = [Example(i, ((word, None),), int(word == "good")) for i, word in enumerate(["good", "bad", "old"] * 4)]
    data = data_of("sst2", examples)
    assert baselines(data, sets(data)) == {"majority": {"accuracy": 2 / 3}, "bag_of_words": {"accuracy": 1.0}}
    copa = read_local(TASKS["copa"], task_files)  # the good fox is the right choice, always
    assert baselines(copa, sets(copa)) == {"majority": {"accuracy": 0.5}, "bag_of_words": {"accuracy": 1.0}}
    stsb = read_local(TASKS["stsb"], task_files)
    found = baselines(stsb, sets(stsb))
    assert found["majority"] == {"pearson": 0.0, "spearman": 0.0}
    assert found["bag_of_words"]["pearson"] > 0.9  # "good" or "bad" says most of the score
