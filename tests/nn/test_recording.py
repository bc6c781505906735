"""What a CUDA graph needs of the host while it is recorded. The graphs themselves: tests/gpu."""

import gc
from contextlib import contextmanager

import pytest
import torch

from pnn.nn.recording import capture


@pytest.fixture
def captured(monkeypatch):
    """Whether Python would collect garbage, each time that a capture begins and ends."""
    found = []

    @contextmanager
    def graph(*_, **how):
        found.append((gc.isenabled(), how))
        try:
            yield
        finally:
            found.append((gc.isenabled(), how))

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return found


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_during_a_capture_and_after_it_all_is_as_before(captured, collects, fails):
    (gc.enable if collects else gc.disable)()
    try:
        if fails:
            with pytest.raises(RuntimeError, match="capture"), capture(None, stream="a stream"):
                raise RuntimeError("the capture failed")
        else:
            with capture(None, stream="a stream"):
                assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert captured == 2 * [(False, {"stream": "a stream"})]
