"""Weights in files give the bits of weights in memory, in bounded host memory, whatever the disk does."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zenflow_compile as zf
from tests.engine.test_failures import root_of, train_until_it_fails
from tests.engine.test_files import change_a_byte_of_each, full_after
from tests.engine.test_interrupts import FILES, interrupted_at
from tests.support.calls import Call, at_calls, calls_of
from tests.support.settings import settings
from tests.support.training import EAGER_BACKEND, Training, assert_same
from zenflow_compile.runtime.host.arena import HostArena
from zenflow_compile.runtime.nvme.cache import NvmeCache
from zenflow_compile.runtime.nvme.chunk import CacheSpan, Chunk, make_transfer
from zenflow_compile.runtime.parameters.moved_weights import is_left_on_host, leave_on_host

pytestmark = pytest.mark.timeout(120)

LAYERS = 6
WEIGHT = 4 * 32 * 32  # bytes, whole pages
WINDOW = 12 * 32 * 32 + WEIGHT  # the least: of one layer's state and weight
SETTINGS = settings("zero_infinity reselecting stale_every_step")
IN_MEMORY = {"zero_infinity": {"policy": "zero_offload"}}


def deep(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers of 4 KB."""
    torch.manual_seed(1)
    middle = [module for _ in range(LAYERS) for module in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), *middle, nn.Linear(32, 10)).to(dtype)


def left_on_host(dtype: torch.dtype) -> nn.Module:
    """As ``move_to_device`` leaves it."""
    model = deep(dtype)
    for param in model.parameters():
        leave_on_host(param, param.data.clone())
    return model


Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path, small_weights: None) -> Iterator[Make]:
    """Makes trainings with state and weights in files of their own, and closes them in the end."""
    numbers, made = count(), []

    def training(
        name: str = "zero_infinity",
        *,
        window: int | None = WINDOW,
        build: Callable[[torch.dtype], nn.Module] = deep,
        **options: Any,
    ) -> Training:
        torch._dynamo.reset()
        path = tmp_path / str(next(numbers))
        path.mkdir()
        files = {
            "offload_device": "nvme_all", "nvme_path": path, "host_window_bytes": window, "offload_weights": 1.0,
        }  # fmt: skip
        made.append(Training(EAGER_BACKEND, {**SETTINGS[name], **files, **options}, build=build))
        return made[-1]

    yield training
    for each in made:
        with suppress(RuntimeError):  # of tests that break something
            each.optimizer.close()
    assert not list(tmp_path.glob("*/*"))


def in_memory(name: str, **options: Any) -> Training:
    torch._dynamo.reset()
    return Training(EAGER_BACKEND, {**IN_MEMORY.get(name, SETTINGS[name]), **options}, build=deep)


def cache_of(training: Training) -> NvmeCache:
    cache = training.optimizer.engine.registry.transport.weight_files
    assert cache is not None
    return cache


LONG = pytest.mark.long


@pytest.mark.parametrize("name", ["zero_infinity", "reselecting", pytest.param("stale_every_step", marks=LONG)])
def test_weights_in_files_train_to_the_same_bits(name: str, make: Make) -> None:
    expected = in_memory(name).run(0, 8)
    training = make(name).run(0, 4)
    with calls_of(make_transfer) as transfers:
        training.run(4, 8)
    moved = [f"{call.arguments['kind']} {call.arguments['chunk'].content.what}" for call in transfers]
    assert moved.count("read the weight") >= 4 * LAYERS
    assert moved.count("write the weight") >= LAYERS
    assert_same(training.weights(), expected.weights())


def test_host_memory_is_bounded(make: Make) -> None:
    """Of arenas and caches, and of the weights that have a place there, also around checkpoints."""
    resident: list[int] = []
    take = NvmeCache._take

    def watched(self: NvmeCache, chunk: Chunk) -> CacheSpan:
        place = take(self, chunk)
        assert place.memory.data_ptr() == self._memory.data_ptr() + place.begin
        resident.append(chunk.size + sum(each.size for each in self.chunks if each.place not in (None, place)))
        return place

    with calls_of(HostArena.__init__) as made, mock.patch.object(NvmeCache, "_take", watched):
        training = make().run(0, 3)
        training.load(training.saved()).run(3, 5)
    arenas = [call.arguments["total_bytes"] for call in made]
    registry = training.optimizer.engine.registry
    gradients = sum(each.gradients[0].nbytes for each in (offloaded.host for offloaded in registry.offloaded.values()))
    biases = registry.weights.host_bytes  # their state is on the device
    assert gradients == LAYERS * WEIGHT + 32 * (16 + 10) * 4
    assert biases == LAYERS * 32 * 4 + 32 * 4 + 64
    assert registry.host_bytes == sum(arenas) == gradients + biases + WINDOW
    assert [each.nbytes for each in registry.transport.caches if each] == [WINDOW - WEIGHT, WEIGHT]
    assert 0 < max(resident) <= WINDOW - WEIGHT
    assert all(weight.values.whole is None for p, weight in registry.weights.weights.items() if p in registry.offloaded)


def test_weights_are_read_ahead_of_their_copies(make: Make) -> None:
    """Where the cache has memory for a few, no copy finds that its weight has not begun to be read."""
    late: list[str] = []

    def noting(call: Call) -> None:
        if call.arguments["chunk"].place is None:
            late.append(call.arguments["chunk"].plan.name)

    training = make(window=12 * 32 * 32 + 4 * WEIGHT).run(0, 3)
    assert [chunk for chunk in cache_of(training).chunks if chunk in cache_of(training)._layout.homes] == []
    with at_calls(noting, NvmeCache.bring):
        training.run(3, 6)
        assert len(late) <= 3  # the first one of a forward, behind the updates
        late.clear()
        with mock.patch.object(NvmeCache, "read_ahead", return_value=None):
            training.run(6, 9)
    assert len(late) > 3 * LAYERS


def write_in_block(training: Training) -> None:
    with training.optimizer.loaded_weights(), torch.no_grad():
        for param in training.model.parameters():
            param.mul_(0.5)


def replace_memory(training: Training) -> None:
    training.optimizer.synchronize()
    for param in training.model.parameters():
        param.data = param.detach() * 0.75


def evaluate_eagerly(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.ones(2, 16)).sum()


HABITS: dict[str, Callable[[Training], object]] = {
    "state_dict": lambda training: training.saved(),
    "load weights first": lambda training: training.load(training.saved()),
    "load state first": lambda training: training.load(training.saved(), weights_first=False),
    "own state": lambda training: training.optimizer.load_state_dict(training.optimizer.state_dict()),
    "flush": lambda training: training.optimizer.flush(),
    "write": write_in_block,
    "replace": replace_memory,
    "evaluate": evaluate_eagerly,
    "more backwards": lambda training: (training.backward(50), training.optimizer.zero_grad()),
}


@pytest.mark.parametrize("name", ["zero_infinity", "reselecting", pytest.param("stale_every_step", marks=LONG)])
def test_readers_and_writers_find_the_same_weights(name: str, make: Make) -> None:
    ends = []
    for training in (make(name), in_memory(name)):
        training.run(0, 3)
        for number, do in enumerate(HABITS.values()):
            do(training)
            training.run(3 + 2 * number, 5 + 2 * number)
        training.optimizer.close()
        ends.append(training.weights_as_they_are())
    assert_same(*ends)


def test_moved_model_trains_from_files(make: Make) -> None:
    expected = in_memory("zero_infinity").run(0, 4).weights()
    training = make(build=left_on_host)
    assert all(map(is_left_on_host, training.model.parameters()))
    assert_same(training.run(0, 4).weights(), expected)


def test_kept_weights_are_updated_from_files(make: Make) -> None:
    expected = in_memory("zero_infinity").run(0, 6).weights()
    training = make(offload_weights=4 * WEIGHT).run(0, 6)
    assert len(training.optimizer.engine.weights.kept) > LAYERS
    assert_same(training.weights(), expected)


@pytest.mark.parametrize("weights_first", [pytest.param(True, marks=LONG), False])
@pytest.mark.parametrize("calls", [0, 1, pytest.param(40, marks=LONG)], ids=["at_once", "after_1", "after_40"])
def test_full_disk_raises_and_the_checkpoint_continues(calls: int, weights_first: bool, make: Make) -> None:
    training = make().run(0, 3)
    saved = training.saved()
    expected = training.run(3, 6).weights()
    training.load(saved)
    with full_after(calls):
        error = train_until_it_fails(training, 3, 12)
        assert isinstance(root := root_of(error), OSError)
        assert root.errno == errno.EFBIG
        assert "load the last saved state" in f"{error} {error.__cause__}"
        for call in (training.optimizer.synchronize, training.optimizer.state_dict):
            with pytest.raises(RuntimeError):
                call()
    assert_same(make().load(saved).run(3, 6).weights(), expected)
    training.optimizer.zero_grad()
    assert_same(training.load(saved, weights_first=weights_first).run(3, 6).weights(), expected)


def break_weights(training: Training) -> None:
    """Change a byte of each weight in its file, and leave none in memory."""
    cache = cache_of(training)
    cache.write_back()
    change_a_byte_of_each(cache.chunks, cache.chunks[0].file.path)


@pytest.mark.parametrize("weights_first", [True, False])
def test_lost_weights_raise_until_they_are_loaded(weights_first: bool, make: Make) -> None:
    training = make("reselecting").run(0, 4)
    saved = training.saved()
    expected = training.run(4, 7).weights()
    training.load(saved)
    training.run(4, 5)
    training.optimizer.engine.weights.prefetch.drop()
    break_weights(training)
    error = train_until_it_fails(training, 5, 7)
    text = f"{error} {error.__cause__}"
    assert "the weight of" in text
    assert "checksum" in text
    training.optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            training.step(5)
    assert_same(training.load(saved, weights_first=weights_first).run(4, 7).weights(), expected)


def test_lost_weights_are_nan_behind_close(make: Make) -> None:
    training = make().run(0, 3)
    training.optimizer.engine.weights.prefetch.drop()
    break_weights(training)
    with pytest.raises(RuntimeError, match="the weight of"):
        training.optimizer.close()
    matrices = [param for param in training.model.parameters() if param.dim() > 1]
    assert all(bool(param.isnan().all()) for param in matrices)


def test_late_copies_keep_their_memory(make: Make) -> None:
    """Mutant: a load does not keep its place, which the next read takes."""
    users: list[int] = []

    def noting(call: Call) -> None:
        chunk, copy = call.arguments["chunk"], call.arguments["copy"]
        assert chunk.place is not None
        users.append(sum(user is copy for user in chunk.place.users))

    with at_calls(noting, NvmeCache.read_by, returned=True):
        make().run(0, 2)
    assert set(users) == {1}


MOVING = FILES | {
    "prepare", "prepare_fresh", "used_by", "bring", "read_by", "forget", "acquire", "stage", "copied_by", "load",
    "_copy_ahead", "flush_window", "_apply_in_host_memory",
}  # fmt: skip


@LONG
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["zero_infinity", "reselecting"])
def test_interrupted_step_recovers_from_a_state(name: str, make: Make) -> None:
    training = make(name).run(0, 3)
    saved = training.saved()
    expected = training.run(3, 5).weights()

    def before_the_step() -> None:
        training.optimizer.zero_grad()
        training.load(saved).run(3, 4)
        training.backward(4)

    def recover() -> None:
        training.optimizer.zero_grad()
        assert_same(training.load(saved).run(3, 5).weights(), expected)
        before_the_step()

    before_the_step()
    assert some_points(training.optimizer.step, recover) > 20


def some_points(do: Callable[[], object], then: Callable[[], object]) -> int:
    """Interrupt ``do`` at every 19th of its points, and call ``then`` each time; returns how many they were."""
    for number in count():
        with interrupted_at(19 * number, MOVING):
            try:
                do()
            except KeyboardInterrupt:
                pass
            else:
                return number
        then()
    raise AssertionError


def test_interrupted_loads_lose_nothing(make: Make) -> None:
    """A forward and its backward are interrupted anywhere, and are run again."""
    training = make().run(0, 3)
    expected = training.loss(3).item()
    training.optimizer.zero_grad()

    def go_on() -> None:
        training.optimizer.zero_grad()
        assert training.loss(3).item() == expected

    def backward() -> None:
        training.backward(3)
        training.optimizer.zero_grad()

    assert some_points(backward, go_on) > 10
    assert_same(training.run(3, 5).weights(), in_memory("zero_infinity").run(0, 5).weights())


BAD = {
    "without weights": ({"offload_weights": False}, "offload_weights=1.0"),
    "small window": ({"host_window_bytes": WINDOW - 1}, f"must be at least {WINDOW}.*and the largest weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_a_remedy(case: str, make: Make) -> None:
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_explain_names_what_is_in_files(make: Make) -> None:
    training = make().run(0, 2)
    text = str(zf.explain(training.call))
    assert "in files" in text
