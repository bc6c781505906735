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


def test_without_a_terminal_a_line_tells_of_those_under_way_alone(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1)
    with progress.Bars(dict.fromkeys("abcd", 10)) as bars:
        bars.update("a", 10)
        bars.update("b", 3, "loss 1.2")
        bars.update("c", 1)
    with progress.Bars({"alone": 10}) as bars:
        bars.update("alone", 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "1 done   3 waiting",
        "b 3/10 loss 1.2   1 done   2 waiting",
        "b 3/10 loss 1.2   c 1/10   1 done   1 waiting",
        "alone 0/10",
    ]
