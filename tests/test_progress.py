"""Progress bars on a terminal."""

import io

from rich.console import Console

from pnn import progress


def test_a_bar_says_which_time_is_which(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, force_terminal=True, width=120))
    with progress.Bars({"training": 10}) as bars:
        bars.update("training", 5, "loss 1.2")
    shown = screen.getvalue()
    assert shown.index("0:00:0") < shown.index("elapsed") < shown.index("left") < shown.index("loss 1.2")
