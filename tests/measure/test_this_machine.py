"""Tests the measurements of this machine for the performance model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from zenflow_compile.measure import bandwidth
from zenflow_compile.measure import this_machine as measuring
from zenflow_compile.measure.this_machine import measured_hardware
from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Bandwidths

GIVEN: dict[str, Any] = {"workers": 1}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    small = mock.patch.multiple(bandwidth, _CPU_ELEMENTS=1 << 12, _MATMUL_SECONDS=0.0)
    measured = mock.patch.multiple(
        measuring,
        rates=lambda *args: Bandwidths(host=7e9, to_host=8e9, to_device=4e9),
        available_host_memory=lambda: (3_000_000, ""),
        free_device_bytes=lambda device: 1_000_000,
    )
    with small, measured:
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "window"),
    [({"update_interval": 4}, 4), ({"policy": "auto", "tokens_per_step": 1, "update_interval": 4}, 4),
     ({"policy": "auto", "tokens_per_step": 1, "device_share": "fill"}, 4),
     ({"policy": "deep_optimizer_states"}, 1)],
)  # fmt: skip
def test_host_is_measured_with_the_optimizers_parts(dtype: torch.dtype, options: dict[str, Any], window: int) -> None:
    seen = []

    def host_rate(kernel: Any, plan: Any, pool: Any) -> float:
        seen.append((plan.interval, plan.dtype, pool.count))
        return 28e9

    params = [torch.zeros(8, 8, dtype=dtype), torch.zeros(9).bfloat16()]
    with mock.patch.object(measuring, "host_rate", host_rate):
        found = measured_hardware(Options(**GIVEN, **options), params)
    assert seen == [(window, dtype, 1)]
    assert (found.workers, found.adam_per_core, found.host_bandwidth) == (1, 1e9, 28e9)
    assert (found.link_to_host, found.link_to_device) == (8e9, 4e9)
    assert found.host_bytes == 3_000_000
    assert found.device_bytes == 1_000_000 + 64 * dtype.itemsize + 18
    assert found.disk_read is found.disk_write is found.disk_bytes is None
    for rate in (found.device_flops, found.device_bandwidth):
        assert 0 < rate < math.inf


def test_disk_is_measured_and_left_empty(tmp_path: Path) -> None:
    found = measured_hardware(Options(**GIVEN, offload_device="nvme", nvme_path=str(tmp_path)), [torch.zeros(8, 8)])
    for rate in (found.disk_read, found.disk_write, found.disk_bytes):
        assert rate is not None
        assert 0 < rate < math.inf
    assert not list(tmp_path.iterdir())


def test_missing_path_is_named(tmp_path: Path) -> None:
    options = Options(**GIVEN, policy="auto", tokens_per_step=1, nvme_path=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"nvme_path=.*does not exist"):
        measured_hardware(options, [torch.zeros(8, 8)])


def test_unused_path_is_not_measured(tmp_path: Path) -> None:
    options = Options(**GIVEN, policy="deep_optimizer_states", nvme_path=str(tmp_path / "none"))
    assert measured_hardware(options, [torch.zeros(8, 8)]).disk_bytes is None
