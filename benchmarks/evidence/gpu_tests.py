"""Runs the tests that need a GPU, one row per test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.common import ROOT
from benchmarks.evidence.setting import Emit, Setting
from zenflow_compile.runtime.host.cores import physical_cores

TRAINING = ("gpu/test_training.py", "gpu/test_readback.py", "gpu/test_state_forms.py")
WEIGHTS = ("gpu/test_weights.py", "gpu/test_offload_all.py")
KERNELS = ("runtime/test_triton_kernels.py", "runtime/test_selection_groups.py", "runtime/test_resident_updates.py")
OTHERS = (
    "gpu/test_device_error.py",
    "runtime/test_registry.py",
    "runtime/test_stream_flags.py",
    "runtime/test_arena.py",
    "timeline/test_events.py",
    "measure/test_bandwidth.py",
    "ranks/test_cuda.py",
    "benchmarks/test_systems.py",
)
"""Files in tests/ that have tests which need a GPU."""

_LONGEST_MESSAGE = 4000
_MOST_PROCESSES = 12
"""At once: each has a context and a small model on the device."""


class _Reporter:
    """A pytest plugin that writes a row as soon as a test is done."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for a test's set-up, call and tear-down; only failures of the first and the last are of interest."""
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            row["message"] = str(report.longrepr)[-_LONGEST_MESSAGE:]
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        self._emit(row)


def measure(setting: Setting, emit: Emit, *, files: Sequence[str]) -> None:
    """Run those of some files. Others are not even imported: they may need packages that a bare machine lacks.

    Raises:
        RuntimeError: a test failed, or there were none.
    """
    import pytest  # the other parts do without it

    reporter = _Reporter(emit)
    options = ["-q", "-m", "gpu", "--tiers", "all", "-p", "no:cacheprovider", "--show-capture=no"]
    # Without --strict-config and --strict-markers: pytest-timeout, whose option and mark are used, may be missing.
    options += ["-o", "addopts=--import-mode=importlib", "--rootdir", str(ROOT)]
    if importlib.util.find_spec("xdist") is not None:
        cores = len(physical_cores())
        options += ["-n", str(min(_MOST_PROCESSES, max(1, cores - 2))), "--dist", "worksteal"]
        os.environ["OMP_NUM_THREADS"] = "1"  # of each process: they compare with trainings on the CPU
    status = pytest.main([*options, *(str(ROOT / "tests" / file) for file in files)], plugins=[reporter])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with status {int(status)}; outcomes: {reporter.outcomes}")
