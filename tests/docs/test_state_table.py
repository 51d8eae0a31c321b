"""The bytes per element in the guide are those that the planner counts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import ParamSpec, make_plan

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "state.md"


def bytes_per_element(**options: object) -> float:
    specs = [ParamSpec(f"w{number}", (4096, 4096), torch.bfloat16) for number in range(16)]
    plan = make_plan(specs, Options.from_keywords(device_share=0.0, **options))
    return plan.host_bytes / sum(param.deferred_numel for param in plan.params)


def test_guide_has_the_planned_bytes() -> None:
    rows = [line.strip("| ").split(" | ") for line in GUIDE.read_text().splitlines() if line.startswith('| `"')]
    assert len(rows) == 6
    for form, *cells in rows:
        state_dtype, split_master = form.replace("`", "").split(", ")
        columns = product(("zenflow", "zero_offload"), (False, 1.0))
        for cell, (policy, offload_weights) in zip(cells, columns, strict=True):
            found = bytes_per_element(
                policy=policy,
                state_dtype=state_dtype.strip('"'),
                split_master=split_master == "True",
                offload_weights=offload_weights,
            )
            assert float(cell) == pytest.approx(found, abs=0.005)
