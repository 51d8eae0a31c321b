"""State in files gives the same numbers with a cache of any size, a failing disk or a killed process."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.engine.test_failures import root_of, train_until_it_fails
from tests.support.calls import Call, at_calls, calls_of, interrupted
from tests.support.gated_jobs import gated
from tests.support.settings import settings
from tests.support.training import EAGER_BACKEND, ENTRIES, ENTRY_IDS, Delays, Training, assert_same, take_step
from zenflow_compile import ZenFlowAdamW, profile
from zenflow_compile.runtime.host.arena import require_host_memory
from zenflow_compile.runtime.nvme import state_file
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.nvme.chunk import CacheSpan, Chunk, chunk_bytes, make_transfer
from zenflow_compile.runtime.nvme.state_file import FILE_THREADS
from zenflow_compile.runtime.parameters.device_state import DeviceState

pytestmark = pytest.mark.timeout(120)

SETTINGS = settings("zero_infinity windows reselecting auto stale_every_step summed_warm_up compressed_stale")
LAYERS = 8
CHUNK_BYTES = 12 * 32 * 32  # of a layer, all of it on the host


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers of equal and unequal size: chunks of 6, 12 and 4 KB."""
    torch.manual_seed(1)
    middle = [module for _ in range(LAYERS) for module in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), *middle, nn.Linear(32, 10)).to(dtype)


class Directories:
    """Gives every optimizer a directory of its own, and closes the optimizers in the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: list[Training] = []

    def training(
        self,
        options: dict[str, Any],
        entry: dict[str, Any] | None = EAGER_BACKEND,
        dtype: torch.dtype = torch.float32,
        *,
        window: int | None = CHUNK_BYTES,
    ) -> Training:
        """State in files behind a cache of ``window`` bytes."""
        path = self._root / str(len(self._made))
        path.mkdir()
        in_files = {"offload_device": "nvme", "nvme_path": path, "host_window_bytes": window}
        self._made.append(Training(entry, {**options, **in_files}, dtype, deep))
        return self._made[-1]

    def close(self) -> None:
        for training in self._made:
            with suppress(RuntimeError):  # of tests that break something
                training.optimizer.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Directories]:
    directories = Directories(tmp_path)
    yield directories
    directories.close()


def in_memory(options: dict[str, Any], entry: dict[str, Any] | None, dtype: torch.dtype) -> Training:
    """Make a training of the same policy with its state in memory."""
    if options.get("policy") == "zero_infinity":
        options = {**options, "policy": "zero_offload"}
    return Training(entry, options, dtype, deep)


def cache_of(training: Training) -> NvmeCache:
    cache = training.optimizer.engine.registry.transport.files
    assert cache is not None
    return cache


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_files_train_to_the_bits_of_memory(
    entry: dict[str, Any] | None, options: dict[str, Any], dtype: torch.dtype, files: Directories
) -> None:
    expected = in_memory(options, entry, dtype).run(0, 12)
    weights = expected.weights()
    for window in (CHUNK_BYTES, 3 * CHUNK_BYTES, 100 * CHUNK_BYTES)[: 3 if dtype is torch.float32 else 1]:
        training = files.training(options, entry, dtype, window=window)
        total = sum(chunk_bytes(plan) for plan in training.optimizer.engine.plan.params if plan.in_file)
        assert cache_of(training).nbytes == min(window, total)
        assert total > 6 * CHUNK_BYTES
        assert_same(training.run(0, 12).weights(), weights)
        assert training.optimizer.engine.uploads.selections == expected.optimizer.engine.uploads.selections
        state = training.optimizer.state_dict()["state"]
        for index, entry_state in expected.optimizer.state_dict()["state"].items():
            own = state[index]
            assert all(torch.equal(own[name], entry_state[name]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_late_file_access_leaves_weights_unchanged(
    entry: dict[str, Any] | None, options: dict[str, Any], files: Directories
) -> None:
    """Reads and writes wait for up to 4 ms, and run in random order."""
    expected = in_memory(options, entry, torch.float32).run(0, 8).weights()
    for seed, window in enumerate((CHUNK_BYTES, 3 * CHUNK_BYTES)):
        with gated(Delays(seed, 4.0).seconds, ("read", "write")) as late:
            training = files.training({**options, "workers": 1.0}, entry, window=window)
            assert_same(training.run(0, 8).weights(), expected)
            assert len(late) > 40


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_resume_is_bitwise_with_and_without_files(options: dict[str, Any], files: Directories) -> None:
    expected = in_memory(options, EAGER_BACKEND, torch.bfloat16).run(0, 12).weights()
    interval = options.get("update_interval", 1)
    for position in range(4, 4 + (interval if isinstance(interval, int) else 4)):  # every position of a window
        training = files.training(options, dtype=torch.bfloat16).run(0, position)
        saved = training.saved()
        assert_same(training.run(position, 12).weights(), expected)
        for weights_first in (True, False):
            resumed = files.training(options, dtype=torch.bfloat16, window=2 * CHUNK_BYTES)
            assert_same(resumed.load(saved, weights_first=weights_first).run(position, 12).weights(), expected)
        if "policy" not in options:
            resumed = in_memory(options, EAGER_BACKEND, torch.bfloat16)
            assert_same(resumed.load(saved).run(position, 12).weights(), expected)


def test_run_goes_back_to_its_own_checkpoint(files: Directories) -> None:
    training = files.training(SETTINGS["reselecting"]).run(0, 5)
    saved = training.saved()
    expected = training.run(5, 9).weights()
    training.backward(99)
    training.optimizer.zero_grad()
    assert_same(training.load(saved).run(5, 9).weights(), expected)


def test_checkpoints_do_not_grow_the_cache(files: Directories) -> None:
    training = files.training({"policy": "zero_infinity"}).run(0, 2)
    cache = cache_of(training)
    resident: list[int] = []
    take = NvmeCache._take

    def watched(self: NvmeCache, chunk: Chunk) -> CacheSpan:
        place = take(self, chunk)
        assert 0 <= place.begin < place.end <= self.nbytes
        assert place.memory.data_ptr() == self._memory.data_ptr() + place.begin
        resident.append(chunk.size + sum(each.size for each in self.chunks if each.place is not None))
        return place

    with mock.patch.object(NvmeCache, "_take", watched):
        training.load(training.saved()).run(2, 4)
    assert cache.nbytes == CHUNK_BYTES
    assert 0 < max(resident) <= CHUNK_BYTES


@contextmanager
def full_after(calls: int) -> Iterator[None]:
    """Let the system refuse writes to files after ``calls`` more of them were queued."""
    left = [calls]
    with ExitStack() as full:

        def making(call: Call) -> None:
            if call.arguments["kind"] == "write":
                left[0] -= 1
                if left[0] == -1:
                    full.enter_context(no_larger_files())

        with at_calls(making, make_transfer):
            yield


@contextmanager
def no_larger_files() -> Iterator[None]:
    """Let the system refuse every write to a file of this process, wherever it comes from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=ENTRY_IDS)
@pytest.mark.parametrize("name", ["zero_infinity", "windows", "reselecting"])
@pytest.mark.parametrize("calls", [0, 1, 7], ids=["at_once", "after_1", "after_7"])
def test_full_disk_raises_and_the_checkpoint_continues(
    entry: dict[str, Any] | None, name: str, calls: int, files: Directories
) -> None:
    options = SETTINGS[name]
    training = files.training(options, entry).run(0, 4)
    saved = training.saved()
    expected = training.run(4, 8).weights()
    training.load(saved)
    with full_after(calls):
        error = train_until_it_fails(training, 4, 12)
        root = root_of(error)
        assert isinstance(root, OSError)
        assert root.errno == errno.EFBIG
        for call in (training.optimizer.synchronize, training.optimizer.state_dict):
            with pytest.raises(RuntimeError):
                call()
    assert_same(files.training(options, entry).load(saved).run(4, 8).weights(), expected)
    assert_same(training.load(saved).run(4, 8).weights(), expected)
    training.optimizer.close()


def test_unreadable_disk_raises(files: Directories) -> None:
    training = files.training({"policy": "zero_infinity"}).run(0, 2)
    file = cache_of(training).files.directory.files[0]
    only_to_write = os.open(file.path, os.O_WRONLY)
    os.dup2(only_to_write, file.opened.fileno(), inheritable=False)
    os.close(only_to_write)
    error = train_until_it_fails(training, 2, 4)
    root = root_of(error)
    assert isinstance(root, OSError)
    assert root.errno == errno.EBADF
    assert "checkpoint" in f"{error} {error.__cause__}"


def change_a_byte_of_each(chunks: list[Chunk], path: Path) -> None:
    with path.open("r+b") as raw:
        for chunk in chunks:
            raw.seek(state_file.PAGE_BYTES + chunk.offset + 100)
            byte = raw.read(1)
            raw.seek(-1, os.SEEK_CUR)
            raw.write(bytes([byte[0] ^ 1]))


@pytest.mark.tier1
@pytest.mark.parametrize("name", ["zero_infinity", "reselecting"])
def test_corrupted_byte_raises_with_file_and_parameter(name: str, files: Directories) -> None:
    training = files.training(SETTINGS[name]).run(0, 4)
    saved = training.saved()
    expected = training.run(4, 7).weights()
    training.load(saved)
    training.optimizer.synchronize()
    training.optimizer.state_dict()  # reads all chunks, so that changed ones are written
    file = cache_of(training).files.directory.files[0]
    change_a_byte_of_each(cache_of(training).chunks, file.path)
    error = train_until_it_fails(training, 4, 6)
    assert f"{file.path}" in f"{error} {error.__cause__}"
    assert ".weight" in f"{error} {error.__cause__}"
    assert "checksum" in f"{error} {error.__cause__}"
    assert_same(training.load(saved).run(4, 7).weights(), expected)


def file_threads() -> int:
    """Threads of this process that read and write state."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("zenflow-file") for name in names)


def test_no_file_is_left_after_close(files: Directories, tmp_path: Path) -> None:
    gc.collect()
    before = file_threads()
    training = files.training({"policy": "zero_infinity"}).run(0, 3)
    path = tmp_path / "0"
    assert file_threads() == before + FILE_THREADS
    assert len(list(path.iterdir())) == 2
    training.optimizer.close()
    assert list(path.iterdir()) == []
    assert file_threads() == before


def test_collected_optimizer_leaves_no_file(tmp_path: Path) -> None:
    options = {"policy": "zero_infinity", "nvme_path": tmp_path}
    training = Training(EAGER_BACKEND, options, build=deep).run(0, 2)
    assert list(tmp_path.iterdir())
    del training.optimizer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_later_group_trains_like_an_early_one(files: Directories) -> None:
    """The new parameter is larger than the earlier ones, so the cache grows."""
    ends = []
    for policy in ("zero_infinity", "zero_offload"):
        torch.manual_seed(0)
        first, second = nn.Linear(32, 32), nn.Linear(32, 64)
        options = {"policy": policy, "min_offload_size": 100}
        if policy == "zero_infinity":
            path = files._root / "group"
            path.mkdir()
            options["nvme_path"] = path
        optimizer = ZenFlowAdamW(first.parameters(), **options)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(second.parameters())})
            torch.manual_seed(step)
            take_step(second(first(torch.randn(4, 32))).square().sum(), optimizer)
            second.zero_grad()
        optimizer.close()
        ends.append([param.detach().clone() for param in (*first.parameters(), *second.parameters())])
    assert_same(ends[0], ends[1])


def test_failed_group_leaves_no_files(tmp_path: Path) -> None:
    options = {"policy": "zero_infinity", "min_offload_size": 100, "nvme_path": tmp_path}
    optimizer = ZenFlowAdamW(nn.Linear(32, 32).parameters(), **options)
    cache = optimizer.engine.registry.transport.files
    assert cache is not None
    before = list(cache.chunks), sorted(tmp_path.iterdir())
    group = {"params": list(nn.Linear(32, 64).parameters())}
    for _ in range(2):
        with interrupted(DeviceState.allocate, MemoryError()), pytest.raises(MemoryError):
            optimizer.add_param_group(group)
        assert (list(cache.chunks), sorted(tmp_path.iterdir())) == before
    optimizer.add_param_group(group)
    assert len(list(tmp_path.iterdir())) == len(before[1]) + 1
    optimizer.close()
    assert not list(tmp_path.iterdir())


def test_failed_first_group_unlocks_the_directory(tmp_path: Path) -> None:
    options = {"policy": "zero_infinity", "min_offload_size": 100, "nvme_path": tmp_path}
    optimizer = ZenFlowAdamW(nn.Linear(4, 4).parameters(), **options)  # so small that it has no file
    optimizer.synchronize()
    group = {"params": list(nn.Linear(32, 64).parameters())}

    full = interrupted(os.posix_fallocate, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with full, pytest.raises(ValueError, match="too little space"):
        optimizer.add_param_group(group)
    assert not list(tmp_path.iterdir())
    state_file.ScratchDirectory(tmp_path).close()
    optimizer.add_param_group(group)
    assert list(tmp_path.glob("*.state"))
    optimizer.close()


def test_cache_needs_its_memory_once(tmp_path: Path) -> None:
    options = {"policy": "zero_infinity", "min_offload_size": 100, "nvme_path": tmp_path}
    with calls_of(require_host_memory) as needed:
        optimizer = ZenFlowAdamW(nn.Linear(32, 32).parameters(), host_window_bytes=CHUNK_BYTES, **options)
        optimizer.synchronize()
        optimizer.add_param_group({"params": list(nn.Linear(32, 32).parameters())})
    optimizer.close()
    # Each group is planned twice: before anything changes, and with it.
    first, *more = dict.fromkeys(call.arguments["needed_bytes"] for call in needed)
    assert first - more[-1] == CHUNK_BYTES


def test_reads_and_writes_are_reported(files: Directories, tmp_path: Path) -> None:
    training = files.training({"policy": "zero_infinity"}).run(0, 2)
    with profile(training.optimizer) as recorded:
        training.run(2, 5)
        training.optimizer.synchronize()
    disk = [event for recording in recorded.recordings() for event in recording.events if event.lane == "disk"]
    assert {event.kind for event in disk} == {"read", "write"}
    assert all(event.bytes % state_file.PAGE_BYTES == 0 and event.bytes for event in disk)
    assert len({event.param for event in disk}) > LAYERS
    assert recorded.summary()["windows_flushed"] == 3 * len(training.optimizer.engine.offloaded)
    report = io.StringIO()
    recorded.report(Console(file=report, width=100))
    assert "disk" in report.getvalue()
    recorded.export_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"read", "write"} <= {event["name"].split()[0] for event in trace["traceEvents"]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"nvme_path": "missing"}, "does not exist"),
    "a_file": ({"nvme_path": "a_file"}, "not a directory"),
    "small_window": ({"host_window_bytes": CHUNK_BYTES - 1, "nvme_path": "."}, "host_window_bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_before_training(case: str, tmp_path: Path) -> None:
    options, message = BAD[case]
    (tmp_path / "a_file").write_text("theirs")
    model = deep()
    before = [param.detach().clone() for param in model.parameters()]
    with chdir(tmp_path), pytest.raises(ValueError, match=message) as caught:
        ZenFlowAdamW(model.parameters(), policy="zero_infinity", min_offload_size=100, **options)
    assert next(iter(options)) in str(caught.value)
    assert "; " in str(caught.value)
    assert_same(list(model.parameters()), before)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


SCRIPT = """
import os, sys, torch
from tests.engine.test_files import deep
from tests.support.training import EAGER_BACKEND, Training
directory, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"reselecting": {"update_interval": 2, "select_interval": 2}}.get(name)
options = options or {"policy": name}
files = {"offload_device": "nvme", "nvme_path": directory + "/swap", "host_window_bytes": 12 * 32 * 32}
training = Training(EAGER_BACKEND, {**options, **files}, torch.bfloat16, deep)
checkpoint, begin = directory + "/checkpoint", 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    begin = state["step"]
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
print("begin", begin, flush=True)
for step in range(begin, steps):
    training.step(step)
    if step == begin:
        print("trains", flush=True)
    if step % 3 == 2:
        state = {"step": step + 1, "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
torch.save(training.weights(), directory + "/weights.new")
os.replace(directory + "/weights.new", directory + "/weights")
"""


@pytest.mark.matrix(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["zero_infinity", "reselecting"])
def test_killed_process_resumes_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """``ZENFLOW_TEST_KILLS=20`` kills the process 20 times, which takes four minutes."""
    kills = int(os.environ.get("ZENFLOW_TEST_KILLS", "1"))
    (tmp_path / "swap").mkdir()
    steps = 60 * (kills + 1)
    chance = random.Random(kills)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), name, str(steps)]
    root = Path(__file__).parents[2]
    begins = []
    for _ in range(kills):
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            begins.append(int(process.stdout.readline().split()[1]))
            if chance.random() < 0.7:
                process.stdout.readline()  # it trains: or else it dies as it loads or compiles
            time.sleep(chance.uniform(0.0, 1.0))  # until a random moment of its training
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert list((tmp_path / "swap").glob("*.state"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    begins.append(int(done.stdout.split()[1]))
    assert begins == sorted(begins)
    assert 0 < begins[-1] < steps
    assert list((tmp_path / "swap").iterdir()) == []
    options = SETTINGS["reselecting"] if name == "reselecting" else {"policy": "zero_offload"}
    expected = Training(EAGER_BACKEND, options, torch.bfloat16, deep)
    for step in range(steps):
        expected.step(step)
        if step % 3 == 2:
            expected.optimizer.state_dict()
    assert_same(torch.load(tmp_path / "weights", weights_only=True), expected.weights())


def test_header_names_format_and_process(files: Directories) -> None:
    training = files.training({"policy": "zero_infinity"})
    file = cache_of(training).files.directory.files[0]
    with file.path.open("rb") as raw:
        assert raw.readline() == state_file.MAGIC
        about = json.loads(raw.readline())
    assert (about["format"], about["pid"]) == (state_file.FORMAT, os.getpid())
    assert about["chunks"] == len(training.optimizer.engine.offloaded)
