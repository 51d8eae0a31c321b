"""Experts in one 3-D parameter: slices are rows or columns of an expert's matrix, and the numbers those of AdamW."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.moe import FAMILIES, built, loss_of
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.planning.plan import Placement

pytest.importorskip("transformers")

ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
OFFLOAD: dict[str, Any] = {"min_offload_size": 1000, "device_share": 0.0, "workers": 1}
SELECTING: dict[str, Any] = {"topk_ratio": 0.2, "update_interval": 4, "select_interval": 4}
EXACT: dict[str, dict[str, Any]] = {
    "zenflow": {"topk_ratio": 0.2, "update_interval": 1, "select_interval": 2},
    "zero_offload": {"policy": "zero_offload"},
    "streamed": {"policy": "deep_optimizer_states", "update_stride": 2},
}
STEPS, SAVED_AT = 9, 6  # in the middle of an update window
ROUNDING = 1e-6


class Run:
    """A family's model and its optimizer."""

    def __init__(self, family: str, options: dict[str, Any] | None, *, compiled: bool = False) -> None:
        torch._dynamo.reset()
        self.model = built(family)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **ADAM)
        if options is not None:
            self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **ADAM, **OFFLOAD, **options)
        self.call = self.model
        if compiled:
            self.call = torch.compile(self.model, backend="zenflow", options={"inner": "eager"})

    def train(self, begin: int = 0, end: int = STEPS) -> Run:
        for step in range(begin, end):
            loss_of(self.call, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def experts(self) -> dict[str, Any]:
        """Plans of the stacks, by name."""
        plans = [each.plan for each in self.optimizer.engine.offloaded.values()]
        return {plan.name: plan for plan in plans if len(plan.shape) == 3}

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> Run:
        state = torch.load(io.BytesIO(content), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return self

    def weights(self) -> list[Tensor]:
        if isinstance(self.optimizer, ZenFlowAdamW):
            self.optimizer.close()
        return [param.detach().clone() for param in self.model.parameters()]


@cache
def adamw(family: str) -> list[Tensor]:
    return Run(family, None).train().weights()


def largest_difference(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("compiled", [False, True], ids=["hooks", "graph"])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_trained_as_by_adamw(family: str, name: str, compiled: bool) -> None:
    run = Run(family, EXACT[name], compiled=compiled).train()
    if name != "streamed":
        assert len(run.experts()) == 4
        for plan in run.experts().values():
            assert (plan.slices, plan.length) == (plan.shape[0] * plan.shape[1], plan.shape[2])  # rows of an expert
    assert largest_difference(run.weights(), adamw(family)) < ROUNDING


@pytest.mark.tier2
@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_overlap_changes_no_bit(family: str) -> None:
    one, other = (
        Run(family, {**SELECTING, "overlap_step": overlaps}, compiled=True).train().weights()
        for overlaps in (True, False)
    )
    assert largest_difference(one, other) == 0.0


@pytest.mark.parametrize("state_dtype", ["bf16", "fp8"])
def test_experts_have_state_in_fewer_bytes(state_dtype: str) -> None:
    run = Run("mixtral", {**SELECTING, "state_dtype": state_dtype}).train(0, 4)
    assert {plan.moments for plan in run.experts().values()} == {state_dtype}
    assert largest_difference(run.weights(), Run("mixtral", SELECTING).train(0, 4).weights()) < 2e-3  # a few steps


def test_resumed_experts_are_bitwise_equal() -> None:
    saving = Run("qwen3", SELECTING).train(0, SAVED_AT)
    content = saving.saved()
    expected = saving.train(SAVED_AT).weights()
    loading = Run("qwen3", SELECTING).train(0, 2).load(content).train(SAVED_AT)
    assert largest_difference(expected, loading.weights()) == 0.0


@pytest.mark.filterwarnings("ignore:the state of .* was saved with other options:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_state_under_another_view_loads(before: int, after: int) -> None:
    """As if it had been flushed before it was saved: moments and masters move, gradients in windows are applied."""
    saving = Run("granite", {**SELECTING, "row_dims": {"*.experts.*": before}}).train(0, SAVED_AT)
    assert {plan.row_dims for plan in saving.experts().values()} == {before}
    content = saving.saved()
    saving.optimizer.flush()
    expected = saving.optimizer.state_dict()["state"]
    loading = Run("granite", {**SELECTING, "row_dims": {"*.experts.*": after}}).load(content)
    loading.optimizer.flush()  # parameters that have one view go on in their windows
    for index, entry in loading.optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(entry[key], expected[index][key], atol=1e-8, rtol=1e-6)
    flushed = [param.detach().clone() for param in saving.model.parameters()]
    assert largest_difference(loading.weights(), flushed) < 1e-8
    saving.optimizer.close()


@pytest.mark.parametrize("before", [1, 2])
def test_exact_state_under_another_view_goes_on(before: int) -> None:
    options = EXACT["zero_offload"]
    content = Run("gpt_oss", {**options, "row_dims": {"*": before}}).train(0, SAVED_AT).saved()
    loading = Run("gpt_oss", {**options, "row_dims": {"*": 3 - before}}).load(content).train(SAVED_AT)
    assert largest_difference(loading.weights(), adamw("gpt_oss")) < ROUNDING


def test_stacks_take_no_more_memory_than_matrices() -> None:
    """Norms, scores and places of 16 bytes a slice, which has as many elements as a row of an expert's matrix."""
    shape = (8, 256, 512)
    with ZenFlowAdamW([torch.nn.Parameter(torch.zeros(shape))], policy="zero_offload", device_share=0.0) as optimizer:
        (offloaded,) = optimizer.engine.offloaded.values()
        assert offloaded.plan.placement is Placement.HOST
        assert (offloaded.plan.slices, offloaded.plan.length) == (8 * 256, 512)
        assert offloaded.device.nbytes <= 0.1 * 8 * 256 * 512
