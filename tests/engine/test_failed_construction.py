"""A failed construction gives back its directory, files, threads, hooks, ownership and descriptors."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.support.training import ADAM, EAGER_BACKEND, OFFLOAD_ALL, Training, assert_same, mlp
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device import staging_ring
from zenflow_compile.runtime.device_updates import streamed_updates
from zenflow_compile.runtime.errors import refuse_threads
from zenflow_compile.runtime.host import arena, workers
from zenflow_compile.runtime.parameters import allocation, capacity, claim, device_state, host_state

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, dict[str, Any]] = {
    "zenflow": {"update_interval": 2},
    "zenflow_files": {"offload_device": "nvme", "host_window_bytes": 1 << 16},
    "zero_infinity": {"policy": "zero_infinity"},
    "weights_in_files": {"policy": "zero_infinity", "offload_weights": 1.0, "offload_device": "nvme_all"},
    "deep_optimizer_states": {"policy": "deep_optimizer_states", "update_stride": 1},
}


def os_error(call: str) -> OSError:
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} in {call}")


def memory_error(call: str) -> MemoryError:
    return MemoryError(f"no memory in {call}")


def thread_error(call: str) -> RuntimeError:
    return RuntimeError("can't start new thread")


# What construction and first use allocate, read and write with, and how each of them fails.
CALLS: list[tuple[Any, str, Callable[[str], Exception]]] = [
    *((os, name, os_error) for name in (
        "open", "pwrite", "ftruncate", "fsync", "posix_fallocate", "preadv", "pwritev", "statvfs", "lstat", "fstat",
    )),
    *((torch, name, memory_error) for name in ("empty", "zeros", "arange")),
    (arena, "_map", memory_error),
    (arena.HostArena, "take", memory_error),
    (device_state.DeviceState, "allocate", memory_error),
    (host_state.HostState, "allocate", memory_error),
    (staging_ring.StagingRing, "fit", memory_error),
    (streamed_updates.StreamedUpdates, "fit", memory_error),
    (streamed_updates.StreamedUpdates, "make", memory_error),
    (allocation, "HostKernel", memory_error),
    (allocation, "make_flags", memory_error),
    (capacity, "require_host_memory", memory_error),
    (claim, "listen_to_grad", memory_error),
    (threading.Thread, "start", thread_error),
]  # fmt: skip


def failing_at(point: int, patch: pytest.MonkeyPatch) -> list[str]:
    """Make one call of those in ``CALLS`` fail: the one after ``point`` others. Returns the names of those made."""
    made: list[str] = []
    for owner, name, error in CALLS:
        original = owner.__dict__[name]
        function = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        def sometimes(*args: Any, function: Any = function, label: str = label, error: Any = error, **kw: Any) -> Any:
            made.append(label)
            if len(made) == point + 1:
                raise error(label)
            return function(*args, **kw)

        static = isinstance(original, (staticmethod, classmethod))  # ``function`` is bound already, or needs no object
        patch.setattr(owner, name, staticmethod(sometimes) if static else sometimes)
    return made


def build(model: nn.Module, options: dict[str, Any]) -> ZenFlowAdamW:
    """Make an optimizer, and use it for the first time."""
    optimizer = ZenFlowAdamW(model.named_parameters(), **{**ADAM, **OFFLOAD_ALL, **options})
    try:
        optimizer.synchronize()
    except BaseException:
        optimizer.close()
        raise
    return optimizer


def threads() -> set[int | None]:
    return {each.ident for each in threading.enumerate() if each.name.startswith("zenflow")}


@pytest.mark.parametrize("name", OPTIONS)
def test_failed_construction_releases_everything(name: str, tmp_path: Path) -> None:
    options = dict(OPTIONS[name])
    if name in ("zenflow_files", "zero_infinity", "weights_in_files"):
        options["nvme_path"] = tmp_path
    model = mlp()
    build(model, options).close()  # what is made once per process
    gc.collect()
    started, descriptors = threads(), psutil.Process().num_fds()
    failed: set[str] = set()
    point = 0
    while True:
        caught: Exception | None = None
        with pytest.MonkeyPatch.context() as patch:
            made = failing_at(point, patch)
            try:
                optimizer = build(model, options)
            except Exception as error:
                caught = error  # kept: its traceback keeps alive all that the failed construction refers to
        if caught is not None:
            failed.add(made[point])
            if made[point].startswith("os."):
                assert not isinstance(caught, OSError)
                assert str(tmp_path) in str(caught)
        else:
            optimizer.close()
        assert threads() == started
        assert psutil.Process().num_fds() == descriptors
        assert not [path for path in tmp_path.iterdir() if path.stat().st_size]  # an empty lock file may stay
        for param in model.parameters():
            assert not param._post_accumulate_grad_hooks
            assert ops.owner_of(param) is None
            assert not hasattr(param, "_zenflow_owner")
        build(model, options).close()
        assert not list(tmp_path.iterdir())
        if len(made) <= point:
            break
        point += 1
    assert point > 20
    runtime = "zenflow_compile.runtime"
    assert {f"{runtime}.parameters.claim.listen_to_grad", f"{runtime}.host.arena._map"} <= failed
    if "nvme_path" in options:
        assert {"os.open", "os.pwrite", "os.ftruncate", "os.posix_fallocate", "os.fsync"} <= failed


@pytest.mark.tier1
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_missing_thread_raises_at_the_first_use(files: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Update windows of one kind are flushed by ``close()`` alone, where an error would come too late."""
    options: dict[str, Any] = {"update_interval": 16}
    if files:
        options |= {"offload_device": "nvme", "nvme_path": tmp_path}
    training = Training(EAGER_BACKEND, options)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match=r"new thread\): raise the limit on processes \(ulimit -u\)"):
            _ = training.optimizer.engine
    with monkeypatch.context() as patch:
        patch.setattr(workers.Workers, "start", lambda pool: refuse_threads(RuntimeError("EAGAIN")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"\(EAGAIN\): raise the limit on processes \(ulimit -u\)"):
                training.step(0)
    expected = Training(EAGER_BACKEND, {"update_interval": 16}).run(0, 3)
    assert_same(training.run(0, 3).weights(), expected.weights())
    training.optimizer.close(), expected.optimizer.close()
    assert_same(training.weights_as_they_are(), expected.weights_as_they_are())
