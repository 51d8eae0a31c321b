"""Flags order threads, and on CUDA threads and streams."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from zenflow_compile.native.library import library
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags, make_flags

CPU = torch.device("cpu")


def test_counters_grow_and_wrap_around() -> None:
    flags = HostFlags(3, device_of(CPU))
    assert Flag(flags, 1, 0).reached()
    assert not Flag(flags, 1, 1).reached()
    Flag(flags, 1, 5).raise_it()
    assert Flag(flags, 1, 5).reached()
    assert not Flag(flags, 1, 6).reached()
    assert not Flag(flags, 2, 1).reached()
    last = 2**32 - 1
    Flag(flags, 0, last).raise_it()
    assert Flag(flags, 0, last).reached()
    assert not Flag(flags, 0, last + 1).reached()
    Flag(flags, 0, last + 2).raise_it()
    assert Flag(flags, 0, last).reached()
    assert Flag(flags, 0, last + 2).reached()


def test_flag_makes_a_thread_wait_for_another() -> None:
    flags = HostFlags(1, device_of(CPU))
    seen: list[int] = []
    written = [0]

    def wait() -> None:
        Flag(flags, 0, 2).wait()
        seen.append(written[0])

    waiting = threading.Thread(target=wait)
    waiting.start()
    Flag(flags, 0, 1).raise_it()
    written[0] = 7
    Flag(flags, 0, 2).raise_it()
    waiting.join(timeout=30)
    assert seen == [7]


def test_no_flags_without_a_device() -> None:
    assert make_flags(4, device_of(CPU)) is None


@pytest.mark.parametrize("refused", [False, True])
def test_driver_writes_behind_a_stream(refused: bool) -> None:
    """A driver that calls host functions later, from a thread of its own; as cuLaunchHostFunc, it may refuse one."""
    launch_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    queue: list[tuple[int, int, int]] = []

    def launch(stream: int, function: int, data: int) -> int:
        queue.append((stream, function, data))
        return 700 if refused else 0

    flags = HostFlags(2, device_of(CPU))
    flag = Flag(flags, 1, 9)
    assert library().zenflow_write_behind(launch_type(launch), 5, flag.address, flag.value) == (700 if refused else 0)
    ((stream, function, data),) = queue
    assert stream == 5
    assert not flag.reached()
    if not refused:
        thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function), args=(data,))
        thread.start()
        flag.wait()
        thread.join()
        assert not Flag(flags, 0, 1).reached()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_and_threads_wait_for_each_other() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = device_of(device).streams
    flags = make_flags(2, device_of(device))
    if streams is None or flags is None:
        pytest.skip("this driver, or this build of PyTorch, has no stream memory operations")
    waiting, writing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
    target = torch.zeros(4, device=device)
    torch.cuda.synchronize()
    Flag(flags, 0, 3).wait_on(streams, waiting)
    with torch.cuda.stream(waiting):
        target.fill_(1.0)
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(writing):
        torch.cuda._sleep(1_000_000)
    Flag(flags, 1, 9).write_from(streams, writing)
    Flag(flags, 1, 9).wait()  # the other stream does not stall this one
    assert not done.query()
    Flag(flags, 0, 3).raise_it()
    done.synchronize()
    assert target.tolist() == [1.0] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_functions_write_in_stream_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = device_of(device).streams
    assert streams is not None
    flags, stream = HostFlags(1, device_of(device)), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
    for value in (1, 2, 3):
        flag = Flag(flags, 0, value)
        streams.write_by_host(stream, flag.address, flag.value)
    assert not Flag(flags, 0, 1).reached()
    stream.synchronize()
    assert Flag(flags, 0, 3).reached()
    assert not Flag(flags, 0, 4).reached()
