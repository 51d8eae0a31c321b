"""The bytes per element in the guide are those that the planner counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import ParamSpec, make_plan

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "state.md"


def bytes_per_element(policy: str, state_dtype: str, split_master: bool) -> float:
    options = Options(policy=policy, device_share=0.0, state_dtype=state_dtype, split_master=split_master)
    plan = make_plan([ParamSpec("w", (4096, 4096), torch.bfloat16)], options)
    return plan.host_bytes / plan.params[0].deferred_numel


def test_guide_has_the_planned_bytes() -> None:
    rows = [line.split(" | ") for line in GUIDE.read_text().splitlines() if line.startswith('| `"')]
    assert len(rows) == 6
    for form, _, _, zenflow, zero_offload, _ in rows:
        state_dtype, split_master = form.removeprefix("| ").replace("`", "").split(", ")
        for policy, said in (("zenflow", zenflow), ("zero_offload", zero_offload)):
            found = bytes_per_element(policy, state_dtype.strip('"'), split_master == "True")
            assert float(said) == pytest.approx(found, abs=0.005)
