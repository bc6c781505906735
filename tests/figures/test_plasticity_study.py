"""Figures of a study, from planted arms: one model or several, small differences and large ones, one seed."""

from __future__ import annotations

import pytest
from planted_study import before, harm, planted

from pnn.figures.plasticity_study import STUDY_FIGURES, growth, ratios
from pnn.studies.plasticity.findings import findings
from pnn.studies.plasticity.study import timed_arms

SIZES = {"gpt2_distil": 81_912_576, "gpt2_small": 124_439_808, "a model with quite a long name": 15_191_712}
STUDIES = {
    "three models": {"models": 3},
    "one model": {"models": 1},
    "one seed": {"models": 2, "seeds": 1},
    "harmless": {"models": 2, "harm": lambda arm: 0.0001 * arm.prune},
    "ruinous": {"models": 2, "harm": lambda arm: 8 * arm.prune},
}


def study(name):
    how = dict(STUDIES[name])
    count = how.pop("models")
    models = {name: before(size) for name, size in list(SIZES.items())[:count]}
    found = findings(models, {name: planted(model, **{"harm": harm, **how}) for name, model in models.items()})
    speed = {arm.name: 1e5 * (1 + arm.prune - arm.grow) for arm in timed_arms()}
    timed = {"rows": [{"batch": 8, "length": 512, "tokens_per_second": speed}]}
    return {"models": models, **found, "speed": dict.fromkeys(models, timed)}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("figure", STUDY_FIGURES)
def test_any_study_can_be_drawn(figure, name, drawn):
    assert drawn(STUDY_FIGURES[figure](study(name)))


def test_every_cell_has_its_number():
    result = study("three models")
    figure = ratios(result)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(texts) == 12
    row = next(row for row in result["tables"]["gpt2_distil"]["ratios"] if (row["prune"], row["grow"]) == (0.2, 0.1))
    assert texts[0] == f"+{100 * row['rise_over_control']['value']:.1f}"


def test_strategies_stand_beside_their_controls():
    figure = growth(study("one model"))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["gradient", "entropy gap", "balanced", "importance", "random", "none"]
