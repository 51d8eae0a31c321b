from __future__ import annotations

import pytest

from zenflow_compile.passes import fetch_parameters, offload_gradients, update_parameters

_BOUNDS = ("SMALL_BYTES", "TOGETHER_BYTES", "OFFLOAD_BYTES")


@pytest.fixture
def ungrouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes insert one op for each parameter."""
    for module in (fetch_parameters, offload_gradients, update_parameters):
        for name in set(_BOUNDS) & set(vars(module)):
            monkeypatch.setattr(module, name, 0)
