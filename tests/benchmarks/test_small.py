"""Benchmarks that run in one process, from end to end at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import clipping, gil_gap, op_overhead, parts, profiler_overhead, waiting_jobs


def test_gil_gap(results: Path) -> None:
    assert gil_gap.main(["--params", "0.01", "--slots", "2", "--repeats", "2"]) == 0
    written = json.loads((results / "gil_gap.json").read_text())
    (row,) = written["rows"]
    assert row["milliseconds"]["gap"]["n"] == 2
    assert row["longest_gap_ms"] >= row["milliseconds"]["gap"]["median"]
    assert written["targets"][0]["limit"] == gil_gap.TARGET_MS


def test_waiting_jobs(results: Path) -> None:
    assert waiting_jobs.main(["--jobs", "3", "--workers", "2", "--rounds", "2", "--operators", "100"]) == 0
    (row,) = json.loads((results / "waiting_jobs.json").read_text())["rows"]
    assert row["waiting"]["n"] == row["alone again"]["n"] == 2


def test_profiler_overhead(results: Path) -> None:
    assert profiler_overhead.main(["--rounds", "2", "--steps", "2", "--layers", "2", "--width", "64"]) == 0
    (row,) = json.loads((results / "profiler_overhead.json").read_text())["rows"]
    assert row["overhead"]["n"] == 2
    assert row["tensors"] == 4


def test_op_overhead(results: Path) -> None:
    assert op_overhead.main(["--tensors", "24", "--inner", "eager", "--rounds", "1", "--steps", "4"]) == 0
    written = json.loads((results / "op_overhead.json").read_text())
    for row, offloaded in zip(written["rows"], (12, 8), strict=True):
        assert (row["tensors"], row["offloaded"]) == (24, offloaded)
        assert row["parts"]["offload_gradients"]["calls"] == 1
        assert row["parts"]["step"]["calls"] == 1
        assert 0 < row["operators_cpu_ms"] < row["cpu_ms"]
    assert len(written["targets"]) == 4


def test_clipping(results: Path) -> None:
    assert clipping.main(["--tensors", "8", "--width", "16", "--rounds", "2"]) == 0
    written = json.loads((results / "clipping.json").read_text())
    (row,) = written["rows"]
    assert row["dense_gradients"] == 0
    assert row["ratio"]["n"] == row["clip_us"]["offloaded"]["n"] == 2
    assert [target["limit"] for target in written["targets"]] == [2.5, 4.0, 0.0]


def test_parts(results: Path) -> None:
    norms_and_split = parts.column_ops.norms_and_split
    assert parts.main(["--model", "tiny", "--inner", "eager", "--rounds", "2", "--windows", "1"]) == 0
    written = json.loads((results / "parts.json").read_text())
    assert [row["variant"] for row in written["rows"]][:3] == ["forward and backward", "resident AdamW", "zenflow"]
    assert len(written["rows"]) == 3 + len(parts.PARTS) + 1
    assert all(row["step_ms"]["n"] == 2 for row in written["rows"])
    assert parts.column_ops.norms_and_split is norms_and_split  # replaced for a turn only
