"""A parameter's slices are divided into groups, and each group selects some of its slices."""

from __future__ import annotations

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.plan import GROUPS, ParamPlan, Placement, group_count
from zenflow_compile.planning.planners import ParamSpec, make_plan

SIZES = [1, 2, 3, 7, 10, 16, 31, 33, 64, 65, 127, 320, 768, 1000, 4096, 11008]
RATIOS = [0.01, 0.1, 0.25, 0.5, 0.9, 0.99]


def plan_of(slices: int, k: int) -> ParamPlan:
    return ParamPlan(
        index=0, name="w", shape=(slices, 1), dtype=torch.float32, placement=Placement.SPLIT_COLUMNS,
        dim=0, slices=slices, length=1, k=k,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("slices", SIZES)
def test_every_group_selects_and_defers_slices(slices: int, ratio: float) -> None:
    """The most groups of ``GROUPS``, of which each has four slices on either side; or one group."""
    k = min(slices, max(1, round(ratio * slices)))
    groups = plan_of(slices, k).groups
    assert groups in GROUPS

    def least(count: int) -> int:
        selected = [len(range(group, k, count)) for group in range(count)]
        sizes = [len(range(group, slices, count)) for group in range(count)]
        return min(min(chosen, total - chosen) for chosen, total in zip(selected, sizes, strict=True))

    assert groups == 1 or least(groups) >= 4
    # A group more than its share can be uneven by one: the rule counts whole shares of both sides.
    assert groups == 48 or min(k, slices - k) < 4 * GROUPS[GROUPS.index(groups) - 1]


def test_group_counts_of_usual_sizes() -> None:
    tenth = {
        slices: group_count(slices, round(0.1 * slices)) for slices in (32, 64, 128, 256, 512, 768, 1024, 4096, 32000)
    }
    assert tenth == {32: 1, 64: 1, 128: 2, 256: 4, 512: 8, 768: 16, 1024: 24, 4096: 48, 32000: 48}


@pytest.mark.parametrize(("slices", "k"), [(0, 0), (64, 0), (64, 64), (1, 1)])
def test_selection_without_a_choice_is_one_group(slices: int, k: int) -> None:
    assert group_count(slices, k) == 1


def test_plans_of_a_policy_have_their_groups() -> None:
    specs = [ParamSpec("w", (1024, 512), torch.float32), ParamSpec("v", (96, 64), torch.float32)]
    plans = make_plan(specs, Options(min_offload_size=0, device_share=0.0)).params
    assert [plan.groups for plan in plans] == [24, 2]
