"""Fixtures that several test folders share."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from torch import nn

from tests.simulated.build import build, missing
from tests.simulated.process import SimulatedProcess
from tests.support.copies import Copies
from tests.support.recording import RecordingEngine
from zenflow_compile.passes import fetch_parameters, offload_gradients, update_parameters
from zenflow_compile.runtime.device import thread_lane
from zenflow_compile.runtime.parameters import host_weights


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample-of-long",
        default="2",
        help='how many of the selected tests marked "long" run, or "all" (default: %(default)s)',
    )
    parser.addoption("--sample-seed", type=int, default=0, help="chooses these tests (default: %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Let interrupts arrive: a shell starts background jobs with SIGINT ignored, and Python leaves it so."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"sample of long tests: {config.getoption('sample_of_long')}, seed {config.getoption('sample_seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark cases of matrices as ``long``, let -m and -k choose, and keep a sample of what is long.

    Every process of a run draws the same cases.
    """
    _draw_from_matrices(config.getoption("sample_seed"), items)
    yield
    _draw_from_long(config, items)


def _draw_from_matrices(seed: int, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, found in cases.items():
        (share,) = found[0].get_closest_marker("matrix").args  # type: ignore[union-attr]
        for item in _not_drawn(found, share, random.Random(f"{seed} {name}")):
            item.add_marker(pytest.mark.long)


def _not_drawn(items: list[pytest.Item], share: int, draw: random.Random) -> list[pytest.Item]:
    """Return the cases of one test that become long.

    One case of ``share`` is drawn. If the test has several arguments, more are drawn, until each value is in one.
    """
    seen: set[tuple[str, int]] = set()
    others = []
    for item in draw.sample(items, len(items)):
        arguments = item.callspec.params  # type: ignore[attr-defined]
        values = {(name, id(value)) for name, value in arguments.items()}  # cases share the objects
        if len(arguments) == 1 or values <= seen:
            others.append(item)
        seen |= values
    return others[max(0, -(-len(items) // share) - (len(items) - len(others))) :]


def _draw_from_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.get_closest_marker("long")]
    count = config.getoption("sample_of_long")
    if count == "all" or len(long) <= int(count):
        return
    kept = set(random.Random(config.getoption("sample_seed")).sample(sorted(item.nodeid for item in long), int(count)))
    dropped = [item for item in long if item.nodeid not in kept]
    items[:] = [item for item in items if item not in set(dropped)]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from the million objects of imported frameworks, through which it takes a second.

    Hundreds of tests call ``gc.collect()``, and so does Accelerate after each training. All that tests make comes
    later, and is collected.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter collect them at its end: bindings report what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """Each test compiles its classes anew, whatever the tests before it compiled; no test resets Dynamo itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def asynchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of tests are small: their copies are as asynchronous as those of large ones."""
    monkeypatch.setattr(thread_lane, "INLINE_BYTES", 0)


@pytest.fixture
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any size may be in host memory."""
    monkeypatch.setattr(host_weights, "SMALLEST_WEIGHT_BYTES", 1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """The copies of all lanes, made as the test says."""
    made = Copies()
    monkeypatch.setattr(thread_lane, "copy_without_gil", made)
    return made


@pytest.fixture
def ungrouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes insert one op for each parameter, as for large ones."""
    for module in (fetch_parameters, offload_gradients, update_parameters):
        for name in {"SMALL_BYTES", "TOGETHER_BYTES", "OFFLOAD_BYTES"} & set(vars(module)):
            monkeypatch.setattr(module, name, 0)


@pytest.fixture
def recording() -> Iterator[Callable[..., RecordingEngine]]:
    """Makes recording engines over a module's parameters and unregisters them afterwards."""
    made: list[RecordingEngine] = []

    def make(module: nn.Module, **keywords: object) -> RecordingEngine:
        made.append(RecordingEngine(module.named_parameters(), **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def simulated() -> Iterator[SimulatedProcess]:
    """A child process with the simulated device, for all tests of this process."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    build()  # here, so that the time that it takes is not that of a call
    process = SimulatedProcess()
    yield process
    process.close()
