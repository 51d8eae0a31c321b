"""The tests that need a GPU, on the fake one: operators compute, and Triton's kernels are replaced by aten's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_gpu.environment import ROOT, on_fake_gpu, run

pytestmark = [*on_fake_gpu, pytest.mark.timeout(3600)]

# Inductor generates kernels of Triton, which compute nothing here.
CHOICE = "not inductor and not slow_copies"


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "gpu").glob("test_*.py")), ids=lambda file: file.stem)
def test_file_passes(file: Path) -> None:
    arguments = ["-m", "pytest", "-m", "gpu", "--tiers", "all", "-q", "-k", CHOICE, "-p", "no:cacheprovider"]
    arguments += ["--timeout", "1800"]  # one core computes what a GPU does
    done = run([*arguments, str(file.relative_to(ROOT))], timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
