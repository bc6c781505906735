"""Things that are timed side by side take turns."""

import itertools

import torch

from pnn import turns

CPU = torch.device("cpu")


def test_runs_take_turns_and_the_first_do_not_count():
    order = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = turns.take_turns(runs, CPU, 0.0, warm_up=2)
    assert order == ["a", "b"] * 5
    assert len(times["a"]) == len(times["b"]) == 3


def test_turns_go_on_for_the_time_that_was_asked_for(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))  # a second passes between two looks
    times = turns.take_turns({"a": lambda: None, "b": lambda: [next(clock) for _ in range(4)]}, CPU, 50.0, warm_up=0)
    assert set(times["a"]) == {1}
    assert set(times["b"]) == {5}
    assert len(times["a"]) == 6  # of nine seconds each: one a look at the clock, two more around each turn, four in b
