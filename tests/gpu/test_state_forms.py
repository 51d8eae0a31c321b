"""State in fewer bytes with a GPU: split masters change hardly a weight, and runs with rounded moments repeat."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.training import make_model, offloading, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
POLICIES: dict[str, dict[str, Any]] = {
    "zero_offload": {"policy": "zero_offload"},
    "re-selecting": {"topk_ratio": 0.25, "select_interval": 4},
    "a step late": {"update_interval": 2, "staleness": 1},
}
ON_DEVICE: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
}


def weights(policy: str, *, compiled: bool, **form: Any) -> list[torch.Tensor]:
    model = make_model(torch.bfloat16)
    with offloading(model, **{**POLICIES, **ON_DEVICE}[policy], **form) as optimizer:
        return train(model, optimizer, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_split_masters_change_hardly_a_weight(policy: str, compiled: bool) -> None:
    """Masters halfway between two bf16 numbers, one in 2**17, are stored an fp32 ulp lower, and others follow."""
    found, expected = (weights(policy, compiled=compiled, split_master=split) for split in (True, False))
    differ = torch.cat([(mine != theirs).flatten() for mine, theirs in zip(found, expected, strict=True)])
    assert differ.float().mean() <= 0.01


@pytest.mark.parametrize("state_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("policy", [*POLICIES, *ON_DEVICE])
def test_runs_with_rounded_moments_repeat(policy: str, state_dtype: str) -> None:
    form = {"state_dtype": state_dtype, "split_master": policy in POLICIES}
    one, other = (weights(policy, compiled=True, **form) for _ in range(2))
    assert all(map(torch.equal, one, other))
