"""The machine that the ``policies`` benchmark predicts with: what ``doctor`` measures, and the workload's own speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import policies, prediction
from benchmarks.prediction import Predictor
from zenflow_compile.cli.doctor import Findings, machine
from zenflow_compile.measure.bandwidth import DeviceRate, HostRates, LinkRates
from zenflow_compile.measure.disk import DiskRates


def test_validation_uses_the_public_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def measure(device: torch.device, threads: list[int], *args: Any, dtype: torch.dtype) -> Findings:
        seen.append((device.type, torch.get_num_threads(), dtype))
        return Findings(
            machine=machine(device),
            host=[HostRates(threads=1, copy=9e9, add=7e9, adam=2.8e9, parameters=1e8)],
            link=[LinkRates("memmove", 5e9, 4e9)],
            device=DeviceRate(1e8, 2.8e9),
            resident=DeviceRate(1e9, 2.8e10),
            matmul_flops=1e11,
            disk=DiskRates(read=1e9, write=5e8, free_bytes=10**12),
        )

    monkeypatch.setattr(prediction, "measure", measure)
    monkeypatch.setattr(prediction, "disk_rates", lambda path: None)
    before = torch.get_num_threads()
    found = Predictor.measure("compute-bound", threads=2, directory=str(tmp_path)).computing(2.0)
    assert seen == [("cpu", 2, torch.float32)]
    assert torch.get_num_threads() == before
    hardware = found.hardware
    assert hardware.device_flops == prediction.step_flops(found.shape, found.tokens) / 2.0
    assert (hardware.device_bandwidth, hardware.host_bandwidth, hardware.device_cores) == (2.8e10, 7e9, 2)
    ratio, stride = found.stride()
    cpu_update = min(hardware.workers * 1e8, 7e9 / 28)
    assert ratio == pytest.approx((3 / 1e9 + 1 / 1e9) / (1 / cpu_update - 1 / 2e9))  # 1e9 fp32 a second over the link
    assert f"{ratio:.2f} updates on the host" in policies.stride_said(ratio, stride)
    assert "too slow" in policies.stride_said(float("inf"), stride)
