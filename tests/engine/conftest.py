"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training import OFFLOAD_ALL


@pytest.fixture
def python_workers() -> Iterator[None]:
    """Let Python's threads run all jobs: a test can delay these, and let them fail."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo its patches
        patch.setitem(OFFLOAD_ALL, "host_kernel", "aten")
        yield
