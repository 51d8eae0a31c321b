"""The table of models larger than the device has what the planner says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import zenflow_compile as zf

PAGE = Path(__file__).parents[2] / "docs/guide/capacity.md"
_ROW = re.compile(r"^\| ([\w.-]+) \| ([\w-]+) \| (\d+) \| (\d+) \| `([^`]+)` \| ([\d. |]+) \|$", re.MULTILINE)
_COMMON = re.compile(r"Each row also has `([^`]+)`")


def keywords(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def rows() -> list[tuple[str, ...]]:
    found = _ROW.findall(PAGE.read_text())
    assert len(found) == 7
    return found


def predicted(row: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    model, hardware, host, tokens, options, _ = row
    common = _COMMON.search(PAGE.read_text())
    assert common is not None
    given = keywords(common[1]) | keywords(options) | changes
    found = zf.plan(
        model,
        hardware,
        devices=1,
        host_bytes=int(host) * 2**30,
        tokens=int(tokens),
        sequence=4096,
        recompute=True,
        **given,
    )
    return dict(found["policies"][0])


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row[:4]))
def test_rows_are_reproducible(row: tuple[str, ...]) -> None:
    found = predicted(row)
    assert found["fits"]
    memory = [sum(items.values()) / 1e9 for items in found["needs"].values()]
    times = [found["step_s"], found["stall_s"]]
    said = [f"{value:.1f}" for value in (*memory, *times)] + [f"{found['tokens_per_s']:.0f}"]
    assert [cell.strip() for cell in row[5].split("|")] == said


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row[:4]))
def test_no_row_fits_with_all_weights(row: tuple[str, ...]) -> None:
    found = predicted(row, offload_weights=False)
    assert set(found["shortages"]) == {"device"}
    assert predicted(row)["step_s"] <= 1.01 * found["step_s"]
