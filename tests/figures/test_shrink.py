"""The figures of scores and repair, and of other ways to prune: every arm is there, with whiskers."""

from __future__ import annotations

from pnn.figures.shrink import COLOURS, beside_peers, scores_and_repair


def test_both_panels_show_every_arm():
    def row(share: float, height: float) -> dict:
        found = {"value": height, "interval": [height - 0.1, height + 0.2]}
        return {"fewer_parameters": share, "pruned": found, "repaired": {"value": height / 2, "interval": [0.0, height]}}

    arms = {arm: [row(0.1, 1.0 + at), row(0.2, 2.0 + at)] for at, arm in enumerate(COLOURS)}
    figure = scores_and_repair({"arms": arms})
    left, right = figure.axes
    assert len(left.containers) == len(right.containers) == len(COLOURS)
    assert list(right.containers[0].lines[0].get_ydata()) == [0.5, 1.0]
    assert list(left.containers[0].lines[0].get_xdata()) == [10.0, 20.0]


def test_a_mark_for_every_way_and_stage():
    def row(stages: tuple[str, ...]) -> dict:
        return {"above_unpruned": {one: {"value": 1.0 + at, "interval": [0.5, 4.0]} for at, one in enumerate(stages)}}

    arms = {"ours": row(("pruned", "text", "teacher")), "llm_pruner": row(("pruned", "lora"))}
    (axes,) = beside_peers({"arms": arms}, {"ours": "ours", "llm_pruner": "theirs"}).axes
    ours, theirs = axes.containers
    assert list(ours.lines[0].get_ydata()) == [1.0, 2.0, 3.0]
    assert [round(x) for x in theirs.lines[0].get_xdata()] == [0, 3]
    assert theirs.lines[0].get_xdata()[0] > ours.lines[0].get_xdata()[0]  # beside, not on top
