"""Benchmarks under test write their results elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import common


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that ``write_results`` writes to."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["benchmark", "--of", "a test"])
    return tmp_path / "results"
