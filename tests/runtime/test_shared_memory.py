"""Overlap of memory is found byte by byte; views that lie side by side, or in each other's holes, do not overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import ParamSpec, empty_plan, extend_plan
from zenflow_compile.runtime.parameters.shared_memory import refuse_overlap

Views = Callable[[Tensor], tuple[Tensor, Tensor]]

OVERLAPPING: dict[str, Views] = {
    "same": lambda flat: (flat.view(8, 12), flat.view(12, 8)),
    "part": lambda flat: (flat[:48].view(6, 8), flat[40:].view(7, 8)),
    "transposed": lambda flat: (flat.view(8, 12), flat.view(8, 12).t()),
    "slice": lambda flat: (flat.view(8, 12)[:, 3], flat[:12].view(3, 4)),
    "other dtype": lambda flat: (flat[:48].view(6, 8), flat.view(torch.bfloat16)[94:142].view(6, 8)),
}
APART: dict[str, Views] = {
    "side by side": lambda flat: (flat[:48].view(6, 8), flat[48:].view(6, 8)),
    "in the hole": lambda flat: (flat.view(8, 12)[::2], flat[12:24].view(3, 4)),
    "columns": lambda flat: (flat.view(8, 12)[:, :6], flat.view(8, 12)[:, 6:]),
    "other dtype": lambda flat: (flat[:48].view(6, 8), flat.view(torch.bfloat16)[96:144].view(6, 8)),
    "empty": lambda flat: (flat.view(8, 12), flat[:0].view(0, 12)),
}


def check(views: tuple[Tensor, ...], policy: str = "zenflow") -> None:
    options = Options.from_keywords(policy=policy, min_offload_size=1, device_share=0.0)
    specs = [ParamSpec(f"w{i}", (8, 12), torch.float32, True) for i in range(len(views))]
    plans = extend_plan(empty_plan(options), specs, options).params
    refuse_overlap(plans, views)


@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING.keys())
@pytest.mark.parametrize("swapped", [False, True])
def test_overlap_is_refused(views: Views, swapped: bool) -> None:
    pair = views(torch.zeros(96))
    with pytest.raises(ValueError, match=r"w0 and w1 overlaps.*memory of its own"):
        check(pair[::-1] if swapped else pair)


@pytest.mark.parametrize("views", APART.values(), ids=APART.keys())
@pytest.mark.parametrize("swapped", [False, True])
def test_disjoint_views_are_accepted(views: Views, swapped: bool) -> None:
    pair = views(torch.zeros(96))
    check(pair[::-1] if swapped else pair)


def test_overlap_with_an_earlier_view_is_found() -> None:
    flat = torch.zeros(96)
    others = tuple(torch.zeros(8, 12) for _ in range(3))
    with pytest.raises(ValueError, match="w0 and w5 overlaps"):
        check((flat.view(8, 12), *others, torch.zeros(8, 12), flat[90:]))


def test_residents_may_overlap() -> None:
    flat = torch.zeros(96)
    check((flat.view(8, 12), flat.view(12, 8)), policy="resident")
