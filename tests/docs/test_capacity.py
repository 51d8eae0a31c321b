"""The tables of models larger than the device have what the planner says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import zenflow_compile as zf
from zenflow_compile.cli import main
from zenflow_compile.cli.plan_report import divided
from zenflow_compile.prediction.answers import fit
from zenflow_compile.prediction.forecast import WORTH_IT
from zenflow_compile.prediction.predict import scenario_of

PAGE = Path(__file__).parents[2] / "docs/guide/capacity.md"
_ROW = re.compile(
    r"^\| ([\w.-]+) \| ([\w-]+) \| ([\d.]+ [GMT]i?B) \| (\d+) \| `([^`]+)` \| ([\d. |]+) \| (yes|no) \|$", re.MULTILINE
)


def keywords(text: str) -> dict[str, Any]:
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def rows() -> list[tuple[str, ...]]:
    found = _ROW.findall(PAGE.read_text())
    assert len(found) == 24
    return found


def scenario(row: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of a prediction for a row, without its options."""
    return {
        "devices": 1,
        "host_bytes": main.memory_bytes(row[2]),
        "tokens": int(row[3]),
        "sequence": 4096,
        "recompute": True,
    }


def predicted(row: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    found = zf.plan(row[0], row[1], **scenario(row), **(keywords(row[4]) | changes))
    return dict(found["policies"][0])


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join((*row[:4], row[6])))
def test_rows_are_reproducible(row: tuple[str, ...]) -> None:
    found = predicted(row)
    assert found["fits"]
    memory = [sum(items.values()) / 1e9 for items in found["needs"].values()]
    times = [found["step_s"], found["stall_s"]]
    said = [f"{value:.1f}" for value in (*memory, *times)] + [f"{found['tokens_per_s']:.0f}"]
    assert [cell.strip() for cell in row[5].split("|")] == said
    given = keywords(row[4])
    every_step = given["policy"] != "zenflow" or given.get("update_interval", 4) == 1
    assert row[6] == ("yes" if every_step and "state_dtype" not in given else "no")


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join((*row[:4], row[6])))
def test_no_row_fits_with_all_weights(row: tuple[str, ...]) -> None:
    assert predicted(row, offload_weights=False)["shortages"]["device"] > 0


CARD = re.compile(
    r"^\| ([\w.-]+) \| (\d(?: r)?) \| ([\d.]+) s \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)


def card_rows() -> list[tuple[str, ...]]:
    """What one card trains, as README.md says."""
    found = CARD.findall((PAGE.parents[2] / "README.md").read_text())
    assert len(found) == 6
    return found


@pytest.mark.parametrize("row", card_rows(), ids=lambda row: row[0])
def test_readme_says_what_one_card_trains(row: tuple[str, ...]) -> None:
    best = fit(scenario_of(row[0], "rtx-4090", policy="auto", recompute=None)).best
    assert best is not None
    sizes = [f"{size / 1e9:.1f}" for size in best.needs.sums().values()]
    assert list(row[1:]) == [divided(best), f"{best.step_s:.1f}", f"{best.tokens_per_s:.0f}", *sizes]


@pytest.mark.long
def test_page_has_what_a_machine_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "--models", "--hardware", "rtx-4090"]) == 0
    lines = {line.rstrip() for line in capsys.readouterr().out.splitlines() if not line.startswith("{")}
    shown = PAGE.read_text().split("plan --models --hardware rtx-4090\n")[1].split("```")[0].splitlines()
    assert [line for line in shown if line not in lines and line != "..."] == []


@pytest.mark.long
@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join((*row[:4], row[6])))
def test_rows_are_the_fastest_that_are_found(row: tuple[str, ...]) -> None:
    best = fit(scenario_of(row[0], row[1], policy="auto", **scenario(row)), exact=row[6] == "yes").best
    assert best is not None
    assert best.step_s == pytest.approx(predicted(row)["step_s"], rel=1.1 * WORTH_IT)
