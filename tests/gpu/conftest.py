"""Every training runs with stream values, and as on drivers without them."""

from __future__ import annotations

import pytest

from zenflow_compile.runtime.device import cuda_driver
from zenflow_compile.runtime.device.cuda import CudaStreams


@pytest.fixture(params=[True, False], ids=["values", "events"])
def stream_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether streams write and wait for numbers in host memory."""
    values: bool = request.param
    if not values:
        monkeypatch.setattr(CudaStreams, "has_values", False)
    elif not cuda_driver.has_bindings():
        pytest.skip("needs cuda-bindings")
    return values
