"""The device interface: which devices are served, and that no other file names a kind of accelerator."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import zenflow_compile
from zenflow_compile.runtime.device.cuda import CudaDevice
from zenflow_compile.runtime.device.devices import device_of

PACKAGE = Path(zenflow_compile.__file__).parent
CPU = torch.device("cpu")
ACCELERATOR = re.compile(r"torch\.cuda\.|is_cuda|cudart|cuda\.bindings|from torch import cuda|[\"']cuda[\"':]")
NAMED_IN = {"runtime/device/cuda.py", "runtime/device/cuda_driver.py", "runtime/device/devices.py"}


def test_one_package_touches_accelerators() -> None:
    named = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in NAMED_IN
        for line in path.read_text().splitlines()
        if ACCELERATOR.search(line.partition("#")[0]) and "``" not in line
    }
    assert named == set()


def test_search_finds_uses_of_accelerators() -> None:
    for line in ("torch.cuda.Stream()", "if grad.is_cuda:", 'device.type == "cuda"', "from torch import cuda"):
        assert ACCELERATOR.search(line)
    assert any(ACCELERATOR.search((PACKAGE / name).read_text()) for name in NAMED_IN)


def test_a_device_is_one_object() -> None:
    assert device_of(torch.device("cpu")) is device_of(CPU)


def test_unknown_device_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'xpu' must be one of cpu, cuda.*subclass Device.*register_device"):
        device_of(torch.device("xpu", 0))


def test_no_triton_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it now raises ImportError
    assert not CudaDevice(torch.device("cuda", 0)).has_triton


def test_blocking_copies_of_the_cpu_are_none() -> None:
    device, tensor = device_of(CPU), torch.ones(3)
    assert device.to_host(tensor, "test") is tensor
    assert device.from_host(tensor, "test") is tensor
    assert not device.blocking
