"""The figure of scores and repair: both panels, a line with whiskers for every arm."""

from __future__ import annotations

from pnn.figures.shrink import COLOURS, scores_and_repair


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
