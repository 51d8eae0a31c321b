"""The device interface: which devices are served, and that no other file names a kind of accelerator."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import zenflow_compile
from zenflow_compile.runtime.device import cuda_driver, devices
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


def test_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DEVICES", {})
    for current in (1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert device_of(torch.device("cuda")) is device_of(torch.device("cuda", current))


def test_host_memory_is_registered_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    calls: list[tuple[str, list[int]]] = []

    @contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def note(name: str) -> Callable[..., int]:
        return lambda *_: calls.append((name, [*current])) or 0

    monkeypatch.setattr(torch.cuda, "device", use)
    names = ("cudaHostRegister", "cudaHostUnregister")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**{name: note(name) for name in names}))
    device = CudaDevice(torch.device("cuda", 1))
    device.register(4096, 4096)
    device.unregister(4096)
    assert calls == [(name, [1]) for name in names]


def test_pinned_buffer_is_freed_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ctypes.create_string_buffer(b"dirty", 8)
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(cuda_driver, "has_bindings", lambda: True)
    monkeypatch.setattr(cuda_driver, "host_alloc", lambda _: ctypes.addressof(memory))
    monkeypatch.setattr(cuda_driver, "host_free", freed.append)
    tensor = torch.frombuffer(CudaDevice(torch.device("cuda", 1)).pinned_buffer(8), dtype=torch.uint8)
    assert tensor.tolist() == [0] * 8
    # At exit the memory must stay: copies and threads that are left may still use it.
    mine = [each for each, about in weakref.finalize._registry.items() if about.func == freed.append]
    assert [each.atexit for each in mine] == [False]
    assert not freed
    del tensor
    gc.collect()
    assert freed == [ctypes.addressof(memory)]


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
