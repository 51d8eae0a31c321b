"""Flags order threads, and on CUDA threads and streams."""

from __future__ import annotations

import threading

import pytest
import torch

from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.stream_flags import Flag, HostFlags, make_flags

CPU = torch.device("cpu")


def test_counters_grow_and_wrap_around() -> None:
    flags = HostFlags(3, device_of(CPU))
    assert len(flags) == 3
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
