"""Tests the host memory's exact size, lifetime, pinning and refusals, and its absence from forked children."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.host import host_memory
from zenflow_compile.runtime.device.devices import CpuDevice, device_of
from zenflow_compile.runtime.host import arena as arena_module
from zenflow_compile.runtime.host.arena import (
    ALIGNMENT_BYTES,
    HostArena,
    available_host_memory,
    carved_bytes,
    require_host_memory,
    touch_pages,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
PIECES = [((5, 7), torch.float32), ((3,), torch.bfloat16), ((), torch.float32), ((129, 2), torch.float16)]


def mapped_range(address: int) -> tuple[int, int, str] | None:
    """(begin, end, VmFlags) of the mapping in this process that contains ``address``."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(head[1], 16), int(head[2], 16)
            found = (begin, end) if begin <= address < end else None
        elif found and line.startswith("VmFlags:"):
            return (*found, line)
    return None


def exit_code_of_child(check: Callable[[], bool]) -> int:
    """0 if ``check`` is true in a forked child, 1 if false, 2 if it raises; negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with PyTorch's threads running
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_pieces_fill_the_arena_exactly() -> None:
    arena = HostArena(carved_bytes(PIECES))
    tensors = [arena.take(shape, dtype) for shape, dtype in PIECES]
    assert arena.used_bytes == arena.total_bytes
    for tensor, (shape, dtype) in zip(tensors, PIECES, strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
        assert not tensor.any()


def test_tensors_do_not_overlap() -> None:
    arena = HostArena(carved_bytes(PIECES))
    tensors = [arena.take(shape, dtype) for shape, dtype in PIECES]
    for value, tensor in enumerate(tensors, start=1):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors, start=1):
        assert (tensor == value).all()


@linux
@pytest.mark.parametrize("total", [1, 3 * mmap.PAGESIZE, (1 << 20) + (1 << 18) + 5])
def test_mapping_is_rounded_to_pages(total: int) -> None:
    arena = HostArena(total)
    assert arena._mapping is not None
    assert len(arena._mapping) == -(-total // mmap.PAGESIZE) * mmap.PAGESIZE


def test_exhausted_arena_names_free_bytes() -> None:
    arena = HostArena(carved_bytes([((32,), torch.float32), ((4,), torch.float32)]))
    first = arena.take((32,), torch.float32)
    with pytest.raises(RuntimeError, match=r"\(33,\) of torch.float32 needs 192 bytes, and of 192 only 64"):
        arena.take((33,), torch.float32)
    second = arena.take((4,), torch.float32)
    assert second.data_ptr() == first.data_ptr() + 128


def test_empty_tensors_take_no_bytes() -> None:
    arena = HostArena(0)
    assert arena.take((0, 9), torch.float32).shape == (0, 9)
    with pytest.raises(RuntimeError, match="exhausted"):
        arena.take((1,), torch.uint8)


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="total_bytes=-1"):
        HostArena(-1)


def test_failed_mapping_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"did not map 1073741824\.0 GiB of host memory.*\(ulimit -v\)"):
        HostArena(1 << 60)


@pytest.mark.parametrize(
    ("length", "text"), [(1, "4.0 KiB"), (100_000, "100.0 KiB"), (200 << 20, "200.0 MiB"), (3 << 29, "1.5 GiB")]
)
def test_size_of_a_failed_mapping_has_its_unit(length: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, *args: Any, **keywords: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module, "_Mapping", Refused)
    with pytest.raises(MemoryError, match=rf"did not map {text} of host memory"):
        HostArena(length)


@linux
def test_children_do_not_inherit_the_mapping() -> None:
    arena = HostArena(1 << 20)
    tensor = arena.take((1 << 18,), torch.float32)
    address = tensor.data_ptr()
    seen = mapped_range(address)
    assert seen is not None
    assert " dc" in seen[2]  # VM_DONTCOPY
    control = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    control_address = torch.frombuffer(control, dtype=torch.uint8).data_ptr()
    assert exit_code_of_child(lambda: mapped_range(address) is None) == 0
    assert exit_code_of_child(lambda: mapped_range(control_address) is None) == 1


@linux
def test_huge_pages_are_advised() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    tensor = HostArena(4 << 20).take((1,), torch.uint8)
    seen = mapped_range(tensor.data_ptr())
    assert seen is not None
    assert " hg" in seen[2]


@linux
def test_child_that_drops_an_arena_unmaps_nothing() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = 1 << 20
    held = [HostArena(size)]
    tensor = held[0].take((size,), torch.uint8)
    address = tensor.data_ptr()
    del tensor

    def memory_at_the_same_address_survives() -> bool:
        fixed = 0x10  # MAP_FIXED, which Python's mmap does not offer
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        where = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), 3, flags, -1, ctypes.c_long(0))
        held.clear()
        gc.collect()
        return where == address and mapped_range(address) is not None

    assert exit_code_of_child(memory_at_the_same_address_survives) == 0


@linux
def test_mapping_lives_as_long_as_its_tensors() -> None:
    arena = HostArena(carved_bytes([((1000,), torch.float32)]))
    tensor = arena.take((1000,), torch.float32)
    address = tensor.data_ptr()
    view = tensor[500:]
    arena.close()
    del arena, tensor
    gc.collect()
    view.fill_(3.0)
    assert view.sum() == 1500
    assert mapped_range(address) is not None
    del view
    gc.collect()
    assert mapped_range(address) is None


def test_closed_arena_allocates_nothing() -> None:
    arena = HostArena(64)
    arena.close()
    arena.close()
    assert not arena.pinned
    for call in (lambda: arena.take((1,), torch.float32), lambda: arena.pin(Registering())):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@linux
def test_touch_makes_pages_resident_and_keeps_contents() -> None:
    def resident_kib(address: int) -> int:
        text = Path("/proc/self/smaps").read_text()
        begin, end, _ = mapped_range(address) or (0, 0, "")
        block = text[text.index(f"{begin:08x}-{end:08x}") :]
        found = re.search(r"Rss:\s+(\d+) kB", block)
        assert found is not None
        return int(found[1])

    arena = HostArena(8 << 20)
    arena._open_mapping().madvise(mmap.MADV_NOHUGEPAGE)  # one fault per page, so that they can be counted
    tensor = arena.take((2 << 20,), torch.float32)
    tensor[5] = 7.0
    assert resident_kib(tensor.data_ptr()) <= 8
    touch_pages(tensor[1 << 18 : (3 << 18) + 1])  # from the first MiB to the start of the page behind the third
    assert resident_kib(tensor.data_ptr()) == 2048 + 4 + 4
    touch_pages(tensor)
    assert resident_kib(tensor.data_ptr()) == 8192
    assert tensor[5] == 7.0
    assert tensor.sum() == 7.0


class Registering(CpuDevice):
    """A device that registers host memory; refuses when told to."""

    def __init__(self, refusal: str = "") -> None:
        super().__init__(torch.device("cpu"))
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refusal = refusal

    def register(self, address: int, size_bytes: int) -> None:
        self.calls += 1
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pinned_buffer(self, size_bytes: int) -> Any:
        if self.refusal.endswith("at all"):
            raise RuntimeError(self.refusal)
        return bytearray(size_bytes)


def test_pin_registers_once_and_close_unregisters() -> None:
    device = Registering()
    arena = HostArena(10_000)
    tensor = arena.take((1,), torch.float32)
    assert arena.pin(device)
    assert arena.pin(device)
    assert arena.pinned
    assert device.calls == 1
    assert device.registered == {tensor.data_ptr(): 3 * mmap.PAGESIZE}
    arena.close()
    assert device.registered == {}


def test_unclosed_arena_is_unregistered_first() -> None:
    device = Registering()
    arena = HostArena(64)
    tensor = arena.take((1,), torch.float32)
    arena.pin(device)
    del arena
    gc.collect()
    assert device.registered  # the tensor still needs it
    del tensor
    gc.collect()
    assert device.registered == {}


def test_refused_pinning_warns_once() -> None:
    device = Registering(refusal="cudaHostRegister: out of memory")
    arena = HostArena(64)
    with pytest.warns(RuntimeWarning, match="slower, and the training thread waits") as caught:
        assert not arena.pin(device, "a smaller model")
    assert len(caught) == 1
    assert "out of memory" in str(caught[0].message)
    assert str(caught[0].message).endswith("make do with less: a smaller model")
    assert device.calls == 1
    assert not HostArena(64).pin(device)  # as for a second arena of an engine
    assert len(caught) == 1
    assert arena.take((4,), torch.float32).fill_(1.0).sum() == 4
    arena.close()
    assert device.registered == {}


def test_refused_registering_takes_the_drivers_memory() -> None:
    device = Registering(refusal="not in this container")
    arena = HostArena(10_000, device)
    assert arena.pinned
    assert arena.pin(device, "a smaller model")  # without a warning
    first, second = arena.take((5,), torch.float32), arena.take((3,), torch.int64)
    first.fill_(2.0)
    assert second.tolist() == [0, 0, 0]
    arena.close()
    gc.collect()
    assert first.sum() == 10.0


def test_refused_everywhere_is_unpinned() -> None:
    device = Registering(refusal="not at all")
    arena = HostArena(10_000, device)
    with pytest.warns(RuntimeWarning, match="not at all"):
        assert not arena.pin(device, "a smaller model")
    assert arena.take((5,), torch.float32).fill_(1.0).sum() == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_copies_both_ways_on_cuda() -> None:
    arena = HostArena(carved_bytes([((1 << 16,), torch.float32)] * 2))
    source, target = arena.take((1 << 16,), torch.float32), arena.take((1 << 16,), torch.float32)
    source.copy_(torch.arange(1 << 16))
    assert not source.is_pinned()
    assert arena.pin(device_of(torch.device("cuda", 0)))
    assert source.is_pinned()
    assert target.is_pinned()
    target.copy_(source.to("cuda", non_blocking=True), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    arena.close()
    assert not target.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_refused_pinning_leaves_no_cuda_error() -> None:
    arena = HostArena(mmap.PAGESIZE)
    address = arena.take((1,), torch.float32).data_ptr()
    assert arena.pin(device_of(torch.device("cuda", 0)))
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        device_of(torch.device("cuda", 0)).register(address, mmap.PAGESIZE)  # registered already
    assert torch.ones(4, device="cuda").sum().item() == 4.0
    arena.close()


def test_too_large_a_plan_names_bytes_and_remedies() -> None:
    require_host_memory(0, "a smaller model")
    require_host_memory(1 << 20, "a smaller model")
    with pytest.raises(ValueError, match=r"need 1024\.0 GiB of host memory, but only \d+\.\d GiB"):
        require_host_memory(1 << 40, "a smaller model")
    with pytest.raises(ValueError, match="choose a smaller model"):
        require_host_memory(1 << 40, "a smaller model")


def test_available_memory_is_the_bound() -> None:
    with host_memory(1000, "a test"):
        require_host_memory(1000, "")
        with pytest.raises(ValueError, match="a test"):
            require_host_memory(1001, "")


def cgroup(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_tightest_cgroup_v2_limits(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    root = tmp_path / "fs"
    stat = "anon 5\ninactive_file 100\n"
    cgroup(root / "job/step", {"memory.max": "max\n", "memory.current": "1", "memory.stat": stat})
    cgroup(root / "job", {"memory.max": "5000\n", "memory.current": "1500\n", "memory.stat": stat})
    available, limited_by = available_host_memory(root, membership)
    assert available == 5000 - 1500 + 100
    assert str(root / "job") in limited_by


def test_cgroup_v1_limits(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:devices:/a\n4:memory:/a\n0::/\n")
    root = tmp_path / "fs"
    files = {"memory.usage_in_bytes": "90", "memory.stat": "total_inactive_file 20\n"}
    cgroup(root / "memory", {"memory.limit_in_bytes": "9223372036854771712", **files})
    cgroup(root / "memory/a", {"memory.limit_in_bytes": "80", **files})
    assert available_host_memory(root, membership)[0] == 10


def test_machine_limits_without_cgroups(tmp_path: Path) -> None:
    available, limited_by = available_host_memory(tmp_path, tmp_path / "missing")
    assert available > 1 << 20
    assert "the machine has" in limited_by
