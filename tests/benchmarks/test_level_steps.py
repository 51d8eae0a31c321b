"""Tests the statistics of level steps, and a run from end to end."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks import level_steps


def test_periodic_long_step_is_detected() -> None:
    turns = [[10.0, 10.0, 10.0, 30.0] * 6] * 3
    assert level_steps.autocorrelation(turns, 4) > 0.8
    assert level_steps.autocorrelation(turns, 2) < 0
    assert level_steps.slowest_phase(turns, 4) == 3.0


def test_noise_is_not_detected() -> None:
    noise = random.Random(0)
    turns = [[10.0 + noise.random() for _ in range(24)] for _ in range(20)]
    assert abs(level_steps.autocorrelation(turns, 4)) < 3 / math.sqrt(20 * 24)
    assert level_steps.slowest_phase(turns, 4) < 1.05


def test_constant_steps_have_no_autocorrelation() -> None:
    assert math.isnan(level_steps.autocorrelation([[1.0, 1.0, 1.0]], 1))
    assert math.isnan(level_steps.autocorrelation([[1.0, 2.0]], 2))


def test_turn_must_hold_whole_windows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        level_steps.main(["--steps", "10"])
    assert "--steps 10 must be a multiple of S = 4" in capsys.readouterr().err


@pytest.mark.long
def test_end_to_end(results: Path) -> None:
    sizes = ["--model", "tiny", "--inner", "eager", "--rounds", "2", "--steps", "8", "--profile", "8"]
    assert level_steps.main(sizes) == 0
    written = json.loads((results / "level_steps.json").read_text())
    assert [row["policy"] for row in written["rows"]] == list(level_steps.POLICIES)
    zenflow = written["rows"][-1]
    assert zenflow["step_ms"]["n"] == 16
    assert zenflow["stall_ms"]["n"] == 8
    assert len(zenflow["autocorrelation"]) == 8
    assert written["targets"][0]["limit"] == 1.25
