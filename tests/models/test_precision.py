"""What a device predicts and learns in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pnn.models.precision import NARROW, learns_in, predicts_in


@pytest.mark.parametrize(
    ("can", "learns"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"architecture": "aarch64"}, torch.float32),
    ],
)
def test_a_cpu_learns_in_bf16_only_if_it_has_instructions_for_it(
    can: dict[str, Any], learns: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
    assert learns_in("cpu", NARROW) == learns
    assert learns_in("cpu", NARROW - 1) == torch.float32
    assert predicts_in("cpu") == torch.float32


def test_a_torch_that_does_not_say_what_a_cpu_can_do_learns_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert learns_in(torch.device("cpu"), 768) == torch.float32


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_predicts_and_learns_in_bf16_if_it_need_not_emulate_it(
    native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert learns_in("cuda", 64) == predicts_in("cuda") == dtype
