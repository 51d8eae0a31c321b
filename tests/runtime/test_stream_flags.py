from __future__ import annotations

import threading

import pytest
import torch

from zenflow_compile.runtime.transfer.stream_flags import HostFlags, make_flags

CPU = torch.device("cpu")


def test_counters_only_grow_and_wrap_around() -> None:
    flags = HostFlags(3, CPU)
    assert len(flags) == 3
    assert flags.reached(1, 0)
    assert not flags.reached(1, 1)
    flags.raise_to(1, 5)
    assert flags.reached(1, 5)
    assert not flags.reached(1, 6)
    assert not flags.reached(2, 1)
    last = 2**32 - 1
    flags.raise_to(0, last)
    assert flags.reached(0, last)
    assert not flags.reached(0, last + 1)
    flags.raise_to(0, last + 2)
    assert flags.reached(0, last)
    assert flags.reached(0, last + 2)


def test_a_thread_waits_for_another() -> None:
    flags = HostFlags(1, CPU)
    seen: list[int] = []
    written = [0]

    def wait() -> None:
        flags.wait(0, 2)
        seen.append(written[0])

    waiting = threading.Thread(target=wait)
    waiting.start()
    flags.raise_to(0, 1)
    written[0] = 7
    flags.raise_to(0, 2)
    waiting.join(timeout=30)
    assert seen == [7]


def test_no_flags_without_a_device() -> None:
    assert make_flags(4, CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_and_threads_wait_for_each_other() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    flags = make_flags(2, device)
    if flags is None:
        pytest.skip("this driver, or this build of PyTorch, has no stream memory operations")
    waiting, writing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
    target = torch.zeros(4, device=device)
    torch.cuda.synchronize()
    flags.wait_on(waiting, 0, 3)
    with torch.cuda.stream(waiting):
        target.fill_(1.0)
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(writing):
        torch.cuda._sleep(1_000_000)
    flags.write_from(writing, 1, 9)
    flags.wait(1, 9)  # the other stream is not held up
    assert not done.query()
    flags.raise_to(0, 3)
    done.synchronize()
    assert target.tolist() == [1.0] * 4
