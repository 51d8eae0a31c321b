"""The process in which tests use the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated.build import build, missing
from tests.simulated.process import SimulatedProcess


@pytest.fixture(scope="session")
def simulated() -> Iterator[SimulatedProcess]:
    """A child process with the simulated device, for all tests of this process."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    build()  # here, so that the time that it takes is not that of a call
    process = SimulatedProcess()
    yield process
    process.close()
