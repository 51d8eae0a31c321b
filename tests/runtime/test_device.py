"""The device interface: which devices are served, and that no other file names a kind of accelerator."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zenflow_compile
from zenflow_compile.runtime.device import cuda
from zenflow_compile.runtime.device.cuda import CudaDevice
from zenflow_compile.runtime.device.devices import device_of, register_device

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


class FakeCuda:
    """Stands for ``torch.cuda`` and ``cuda_driver`` in the one file that calls them.

    Attributes:
        calls: of the runtime and the driver, with the devices that were current in them and an address.
    """

    def __init__(self) -> None:
        self.currents = [0]
        self.calls: list[tuple[str, int, int]] = []
        self.memory = ctypes.create_string_buffer(b"dirty", 8)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.currents.append(device.index)
        yield
        self.currents.pop()

    def current_device(self) -> int:
        return self.currents[-1]

    def current_stream(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def cudart(self) -> Any:
        names = ("cudaHostRegister", "cudaHostUnregister")
        return SimpleNamespace(**{name: partial(self._note, name) for name in names})

    def has_bindings(self) -> bool:
        return True

    def host_alloc(self, size_bytes: int) -> int:
        return ctypes.addressof(self.memory)

    def host_free(self, address: int) -> None:
        self._note("host_free", address)

    def _note(self, name: str, address: int, *_: object) -> int:
        self.calls.append((name, self.currents[-1], address))
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(cuda, "cuda_driver", made)
    monkeypatch.setattr(cuda.torch, "cuda", made)
    return made


def test_device_without_index_is_the_current_one(fake: FakeCuda) -> None:
    register_device("cuda", CudaDevice)  # forgets those that were made
    for current in (1, 0):
        fake.currents = [current]
        assert device_of(torch.device("cuda")) is device_of(torch.device("cuda", current))
    register_device("cuda", CudaDevice)


def test_host_memory_is_registered_on_the_device(fake: FakeCuda) -> None:
    device = CudaDevice(torch.device("cuda", 1))
    device.register(4096, 4096)
    device.unregister(4096)
    assert fake.calls == [("cudaHostRegister", 1, 4096), ("cudaHostUnregister", 1, 4096)]


def test_pinned_buffer_is_freed_with_its_last_user(fake: FakeCuda) -> None:
    tensor = torch.frombuffer(CudaDevice(torch.device("cuda", 1)).pinned_buffer(8), dtype=torch.uint8)
    assert tensor.tolist() == [0] * 8
    # At exit the memory must stay: copies and threads that are left may still use it.
    mine = [each for each, about in weakref.finalize._registry.items() if about.func == fake.host_free]
    assert [each.atexit for each in mine] == [False]
    assert not fake.calls
    del tensor
    gc.collect()
    assert [(name, address) for name, _, address in fake.calls] == [("host_free", ctypes.addressof(fake.memory))]


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
