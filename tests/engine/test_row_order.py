"""Numbers depend on which slices are selected, not on the order in which the rows of their state are stored.

A loaded state has rows in ascending order of slices, the run that saved it in the order that re-selections made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.training import ADAM, ENTRIES, ENTRY_IDS, OFFLOAD_ALL, take_step
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime.checkpoint.format import SCHEDULE
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam

STEPS = 44
FEATURES, HIDDEN, CLASSES = 83, 75, 5

CASES: dict[str, dict[str, Any]] = {
    "drift": {"update_interval": 4},
    "interval": {"update_interval": 4, "select_interval": 8},
    "auto": {"update_interval": (1, 5), "auto_ratio": 0.7},
    "int8": {"update_interval": 4, "gradient_transfer": "int8"},
    "int8_interval": {"update_interval": 4, "gradient_transfer": "int8", "select_interval": 8},
    "summed": {"update_interval": 4, "gradient_transfer": "mean"},
    "summed_auto": {"update_interval": "auto", "auto_ratio": 0.7, "gradient_transfer": "mean"},
    "clipped": {"update_interval": 4, "max_grad_norm": 0.1},
}


def network() -> nn.Module:
    """Rows of 75 and 5 elements, which fill no CPU vector; 83 and 75 slices."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Other features are large every few steps, and most are zero: their slices have equal scores, and gradients."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, FEATURES, generator=generator)
    large = torch.zeros(FEATURES)
    large[torch.randperm(FEATURES, generator=torch.Generator().manual_seed(step // 9))[:12]] = 3.0
    return inputs * large, torch.randint(0, CLASSES, (8,), generator=generator)


class Run:
    """A training whose state's rows can be put into another order between steps."""

    def __init__(self, entry: dict[str, Any] | None, options: dict[str, Any], dtype: torch.dtype) -> None:
        self.model = network().to(dtype)
        self.dtype = dtype
        settings = {**ADAM, **OFFLOAD_ALL, "topk_ratio": 0.3, **options}
        self.optimizer = ZenFlowAdamW(self.model.named_parameters(), **settings)
        self.call = torch.compile(self.model, **entry) if entry else self.model

    def step(self, step: int) -> None:
        inputs, targets = batch(step)
        take_step(F.cross_entropy(self.call(inputs.to(self.dtype)).float(), targets), self.optimizer)
        self.optimizer.synchronize()

    def permute_rows(self, generator: torch.Generator) -> None:
        for offloaded in self.optimizer.engine.offloaded.values():
            permute(offloaded, generator)

    def outcome(self) -> dict[str, Any]:
        """Return the results that must be equal bit for bit."""
        engine = self.optimizer.engine
        offloaded = engine.offloaded.values()
        return {
            "weights": [param.detach().clone() for param in self.model.parameters()],
            "selected": [sorted(each.device.selection.selected.tolist()) for each in offloaded],
            "scores": [each.device.score.clone() for each in offloaded],
            "schedule": [engine.schedule.state(each.plan.index) for each in offloaded],
            "flushed": (engine.steps.windows_flushed, engine.uploads.selections),
        }


def permute(offloaded: OffloadedParam, generator: torch.Generator) -> None:
    """Store the rows of both sides in another order; nothing is in flight, as after ``synchronize()``."""
    device, host, parts = offloaded.device, offloaded.host, offloaded.parts
    old = device.selection
    inside = torch.randperm(len(old.selected), generator=generator)
    outside = torch.randperm(len(old.deferred), generator=generator)
    for block in device.rows.stored:
        block.copy_(block[inside])
    with host.acquire(write=True) as state:
        for block in state.stored:
            block.copy_(block[outside])
    for index in {buffer.index for buffer in host.open}:
        for buffer in host.open:
            buffer.copied.wait()
        blocks = scales_and_values(host.gradients[index]) if offloaded.plan.compressed else (host.gradients[index],)
        for block in blocks:
            block.copy_(block[outside])
    if parts.residual is not None:
        parts.residual.lost.copy_(parts.residual.lost[outside])
    if parts.window_sum is not None:
        parts.window_sum.total.copy_(parts.window_sum.total[outside])
    device.selection = Selection.of(
        old.selected[inside], old.slices, old.selected.device, deferred=old.deferred[outside]
    )


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], step: int) -> None:
    for name, value in expected.items():
        if isinstance(value[0], Tensor):
            assert all(torch.equal(a, b) for a, b in zip(actual[name], value, strict=True)), (name, step)
        else:
            assert actual[name] == value, (name, step)


ATTEMPTED = SCHEDULE.index("attempted")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_row_order_changes_no_number(case: str, dtype: torch.dtype, entry: dict[str, Any] | None) -> None:
    one, other = (Run(entry, CASES[case], dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    assert [each.plan.groups for each in one.optimizer.engine.offloaded.values()] == [4, 4]
    chosen = set[tuple[int, ...]]()
    lengths = set[int]()
    for step in range(STEPS):
        one.step(step)
        other.step(step)
        expected = one.outcome()
        assert_equal(other.outcome(), expected, step)
        chosen.add(tuple(expected["selected"][0]))
        lengths |= {state[ATTEMPTED] for state in expected["schedule"]}
        other.permute_rows(generator)
    assert len(chosen) > 2, "selections never change"
    if not isinstance(CASES[case]["update_interval"], int):
        assert len(lengths) > 2, "windows never adapt"
    one.optimizer.close()
    other.optimizer.close()
