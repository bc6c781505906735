"""Every verdict can come out either way: models with planted behaviour, and the verdicts follow."""

import pytest
import torch
from planted import ANSWER, EASY, FREE, HARD, MEDIUM, WIDTH, WRONG, answers, model, tables, text, word

from pnn.analysis.subject import Subject
from pnn.data.tokenizers import of_synthetic_language
from pnn.studies.run import perform

ALL = range(32)


def analysed(name, built, over):
    return perform(name, Subject(built, over))


def verdict(name, built, count=60):
    return analysed(name, built, text(count))["verdict"]


def test_the_planted_model_does_what_it_says():
    """Easy positions are right from the embeddings on, medium ones from the step at which they are told, hard ones never."""
    found = analysed("convergence", model(answers(tables(), step=1)), text())
    shares = [found["classes"][name]["share"] for name in ("easy", "medium", "hard")]
    assert shares[0] == pytest.approx(6 / 23, abs=0.05)
    assert shares[1] == pytest.approx(7 / 23, abs=0.05)
    by_step = [row["value"] for row in found["correct_by_step"]]
    assert by_step[0] == by_step[1] == shares[0]
    assert by_step[2] == by_step[4] == pytest.approx(shares[0] + shares[1])
    assert found["first_correct_counts"][2] == found["classes"]["medium"]["targets"]


def test_hard_tokens_that_keep_changing_converge_later():
    delta = answers(tables())
    for step in range(4):  # a new wrong word at every step, stronger than the one before
        delta[step, list(HARD), WRONG[step]] = 2.0 + step
    found = analysed("convergence", model(delta), text())["findings"]
    assert found["hard_tokens_converge_later"]["verdict"] == "supported"
    assert found["hard_tokens_settle_later"]["verdict"] == "supported"
    assert found["hard_tokens_settle_later_at_equal_frequency"]["verdict"] == "supported"


def test_hard_tokens_that_stay_wrong_do_not():
    found = analysed("convergence", model(answers(tables(), step=3)), text())["findings"]
    assert found["hard_tokens_converge_later"]["verdict"] == "not supported"
    assert found["hard_tokens_settle_later"]["verdict"] == "not supported"
    assert found["hard_tokens_settle_later_at_equal_frequency"]["verdict"] == "not supported"


def test_easy_tokens_of_one_word_and_of_several():
    """A step 0 that guesses one word everywhere is right where that word is the answer, and nowhere else."""
    several = analysed("convergence", model(answers(tables())), text())
    assert several["findings"]["easy_tokens_are_one_word"]["verdict"] == "not supported"  # six words, by their positions
    constant = model(answers(tables()))
    with torch.no_grad():
        constant.head.decoder.bias[word(1)] = 20.0
    one = analysed("convergence", constant, text())
    assert one["findings"]["easy_tokens_are_one_word"]["verdict"] == "supported"
    shares = [one["step_0"][f"share_of_{what}"] for what in ("guesses", "easy_targets", "targets")]
    assert shares == [1.0, 1.0, one["classes"]["easy"]["share"]]
    assert one["step_0"]["guess"] == of_synthetic_language(32).convert_ids_to_tokens(word(1))
    assert one["classes"]["medium"]["share"] == several["classes"]["medium"]["share"]  # it is only step 0 that is constant


@pytest.mark.parametrize(("sizes", "expected"), [((8, 4, 2, 1), "supported"), ((1, 2, 4, 8), "not supported")])
def test_updates_that_shrink_and_that_grow(sizes, expected):
    delta = tables()
    for step, size in enumerate(sizes):
        delta[step, :, FREE] = size
    assert verdict("meg", model(delta)) == expected


@pytest.mark.parametrize(("narrow", "expected"), [(1, "supported"), (0, "not supported")])
def test_a_narrow_update_in_the_middle_and_at_the_start(narrow, expected):
    delta = tables()
    delta[:, :, FREE] = 1.0
    delta[narrow, :, FREE] = 0.0
    delta[narrow, :, FREE.start] = 1.0
    assert verdict("modeling", model(delta)) == expected


def test_dimensions_with_roles_and_all_alike():
    delta = tables()
    delta[:, :, 44:50] = 1.0
    delta[0, :, 50:56], delta[1:, :, 50:56] = 2.0, -0.5
    different = perform("dimensionwise", Subject(model(delta), text()))
    assert different["verdict"] == "supported"
    assert different["pattern_counts"]["accumulator"] >= 6
    assert different["pattern_counts"]["oscillator"] >= 6
    assert different["pattern_counts"]["stable"] > 0
    alike = tables()
    alike[:] = 1.0
    assert verdict("dimensionwise", model(alike)) == "not supported"


@pytest.mark.parametrize(("moved", "expected"), [(HARD, "supported"), (EASY, "not supported")])
def test_who_is_moved_further(moved, expected):
    delta = answers(tables())
    delta[:, list(moved), FREE] = 3.0
    assert verdict("difficulty", model(delta)) == expected


@pytest.mark.parametrize(("sign", "expected"), [(1.0, "supported"), (-0.2, "not supported")])
def test_activity_that_adds_up_and_that_cancels(sign, expected):
    delta = tables()
    delta[:, :, FREE] = 0.5
    if sign < 0:  # every second update takes back the one before
        delta[1::2] *= -1
    assert verdict("layerwise_activity", model(delta)) == expected


def gated(matters):
    """δ carries the answers and loud wrong words; gates let the answers through and, if they matter, only those."""
    delta = answers(tables(), size=6.0)
    delta[0][list(MEDIUM), WRONG[0]] = 30.0
    gate = torch.full_like(delta, 0.5)
    if matters:
        gate[:, :, WRONG[0]] = 0.0
        gate[:, :, 32:39] = 1.0
    else:
        delta[0, :, WRONG[0]] = 0.0
    return model(delta, gate)


def test_a_gate_that_matters_and_one_that_does_not():
    found = perform("gate_specificity", Subject(gated(matters=True), text()))
    assert found["verdict"] == "supported"
    assert found["control"]["value"] < 0.01 < found["effect"]["value"]
    none = perform("gate_specificity", Subject(gated(matters=False), text()))
    assert none["verdict"] == "not supported"
    assert none["effect"]["value"] == 0  # all gates alike: shuffling them changes nothing at all


@pytest.mark.parametrize(("decided", "expected"), [(EASY, "supported"), (HARD, "not supported")])
def test_where_gates_are_decided(decided, expected):
    delta = answers(tables())
    gate = torch.full_like(delta, 0.6)
    gate[:, list(decided)] = 0.98
    assert verdict("gate_entropy", model(delta, gate)) == expected


def near(masked):
    """Whether a token within three places is masked, as 0 (it is) or 1."""
    return around(masked, range(1, 4))


def far(masked):
    return around(masked, range(6, 19))


def around(masked, distances):
    counts = torch.zeros(len(masked))
    for distance in distances:
        counts[distance:] += masked[:-distance].float()
        counts[:-distance] += masked[distance:].float()
    return (1 / (1 + counts)).clamp(min=0.05)


@pytest.mark.parametrize(("held_back", "expected"), [(near, "supported"), (None, "not supported")])
def test_neighbours_that_hold_back(held_back, expected):
    delta = answers(tables(), size=1.0)
    assert verdict("cross_token", model(delta, held_back=held_back), count=300) == expected


def test_parts_with_a_causal_role_and_one_without():
    """δ is looked up through attention: all three parts matter. Looked up from the state: attention does not."""
    delta = answers(tables())
    delta[0, :, WRONG[0]] = 20.0
    gate = torch.ones_like(delta)
    gate[0, list(MEDIUM), WRONG[0]] = 0.0
    gate[0, list(EASY), WRONG[0]] = 0.0
    with_attention = Subject(model(delta, gate, through_attention=True), text())
    assert perform("optogenetics", with_attention)["verdict"] == "supported"
    without = perform("optogenetics", Subject(model(delta, gate), text()))
    assert without["verdict"] == "not supported"
    assert without["mean_ablation"]["attention"]["accuracy_drop"]["value"] == 0
    ranking = perform("layer_importance", Subject(model(delta, gate), text()))
    assert ranking["importance_ranking"][-1]["component"] == "attention"


def test_a_ranking_that_holds_and_one_that_does_not():
    delta = answers(tables())
    gate = torch.full_like(delta, 0.5)  # neither gates (all alike) nor attention (not used) matter: the same drop, none
    assert verdict("layer_importance", model(delta, gate)) == "not supported"
    delta[0, list(MEDIUM)[:2], WRONG[0]] = 20.0
    gate[0, list(MEDIUM)[:2], WRONG[0]] = 0.0
    assert verdict("layer_importance", model(delta, gate), count=200) == "supported"


def test_an_ffn_halved_behind_a_norm_is_no_intervention():
    delta = answers(tables())
    norm = torch.nn.LayerNorm(WIDTH, eps=1e-12)
    with_norm = perform("optogenetics", Subject(model(delta, norm=norm), text()))
    assert with_norm["undone_by_norm"]
    assert with_norm["suppression"]["ffn"]["50"]["accuracy_drop"]["value"] == 0
    assert with_norm["suppression"]["delta"]["75"]["loss_increase"]["value"] > 0  # behind the norm it is one
    assert not perform("optogenetics", Subject(model(answers(tables(), size=0.4)), text()))["undone_by_norm"]


@pytest.mark.parametrize(
    ("shut", "open_", "expected"),
    [
        ((0.4, 0.3, 0.2, 0.1), (0.6, 0.7, 0.8, 0.9), "supported"),  # as many above one half at every step, ever further apart
        ((0.1, 0.2, 0.3, 0.4), (0.9, 0.8, 0.7, 0.6), "not supported"),
        ((0.6, 0.4, 0.3, 0.2), (0.7, 0.5, 0.4, 0.3), "not supported"),  # they close, as far apart as they were
    ],
)
def test_gates_that_differ_more_within_a_token_and_gates_that_only_close(shut, open_, expected):
    gate = tables()
    for step in range(4):
        gate[step, :, ::2], gate[step, :, 1::2] = shut[step], open_[step]
    found = analysed("gates", model(answers(tables()), gate), text())
    assert found["findings"]["gates_become_more_selective"]["verdict"] == expected
    spread = [row["value"] for row in found["spread_within_token_by_step"]]
    half = [(high - low) / 2 * (WIDTH / (WIDTH - 1)) ** 0.5 for low, high in zip(shut, open_, strict=True)]
    assert spread == pytest.approx(half, rel=1e-5)
    assert found["open_by_step"][0]["value"] == pytest.approx((shut[0] > 0.5) / 2 + (open_[0] > 0.5) / 2)


def test_a_path_that_goes_downhill_and_one_that_does_not():
    downhill, uphill = tables(), tables()
    for position, dimension in ANSWER.items():
        downhill[:, position, dimension] = 0.08
        uphill[:, position, dimension] = -0.08
    for sense, expected in ((downhill, "supported"), (uphill, "not supported")):
        found = analysed("optimisation", model(sense), text())["findings"]
        assert {name: one["verdict"] for name, one in found.items()} == dict.fromkeys(found, expected)
