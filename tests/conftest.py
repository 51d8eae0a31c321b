"""Fixtures that several test folders share."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.simulated.build import build, missing
from tests.simulated.process import SimulatedProcess
from tests.support import compilation, durations, left_behind
from tests.support import tiers as tiers_of_tests
from tests.support.copies import Copies, copied_by
from tests.support.native_code import NativeCode, not_loaded
from tests.support.progress import Progress
from tests.support.recording import RecordingEngine
from tests.support.tiers import COLLECTED, TIER
from zenflow_compile.passes import fetch_parameters, offload_gradients, update_parameters
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device import thread_lane
from zenflow_compile.runtime.parameters import host_weights


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tiers", default="1", choices=["1", "1,2", "2", "all"], help="which tests run (default: %(default)s)"
    )
    parser.addoption("--seed", type=int, default=0, help="draws the cases of tiers 1 and 2 (default: %(default)s)")
    parser.addoption("--commit", help="number that draws what of tier 3 runs with tier 2, or none (default: the hash)")
    durations.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    compilation.measure_no_guards()
    compilation.print_no_graphs()
    left_behind.pytest_configure(config)
    durations.register(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config, _tiers(config)), "progress")


def _tiers(config: pytest.Config) -> list[int]:
    chosen = config.getoption("tiers")
    return [1, 2, 3] if chosen == "all" else [int(each) for each in chosen.split(",")]


def _commit(config: pytest.Config) -> str:
    """The number that draws from tier 3, or "none": the same in all processes of a run."""
    given = getattr(config, "workerinput", {}).get("commit") or config.getoption("commit")
    return str(given or tiers_of_tests.number_of_commit())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the number to a process that will run tests."""
    node.workerinput["commit"] = _commit(node.config)


def _is_named(item: pytest.Item, arguments: list[tuple[Path, str]]) -> bool:
    """Whether an argument of the command names this test, or one of its cases."""
    name = item.nodeid.partition("::")[2]
    return any(
        each and name in (each, f"{each}[{name.partition('[')[2]}") and item.path == file for file, each in arguments
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Give each test its tier, let -m and -k choose, and keep those of the chosen tiers and those that are named.

    Every process of a run draws the same cases.
    """
    record, tiers = tiers_of_tests.Durations.read(), _tiers(config)
    tiers_of_tests.assign(items, record, config.getoption("seed"))
    config.stash[COLLECTED] = list(items)
    drawn = set()
    if 3 not in tiers and (commit := _commit(config)) != "none":
        drawn.update(tiers_of_tests.drawn_by_commit(items, record, int(commit)))
    yield
    parts = [argument.partition("::") for argument in config.args]
    named = [(Path(config.invocation_params.dir, file).resolve(), name) for file, _, name in parts]
    kept, dropped, later = [], [], Counter[int]()
    for item in items:
        tier = 2 if item in drawn else item.stash[TIER]
        if tier in tiers or _is_named(item, named):
            kept.append(item)
        else:
            dropped.append(item)
            later[tier] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["later"] = dict(later)
    else:
        config.pluginmanager.get_plugin("progress").later = later  # type: ignore[union-attr]


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from imported frameworks, see ``few_objects_to_collect``."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect() -> None:
    """Keep the garbage collector away from what was imported and cached before a module's tests.

    These are a million objects, through which it takes a second. Hundreds of tests call ``gc.collect()``, and so does
    Accelerate after each training. All that tests make comes later, and is collected.
    """
    torch._dynamo.reset()
    gc.collect()
    if not ops.any_owner():  # one that is frozen with what refers to it would stay, and be there for later tests
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
def copies() -> Iterator[Copies]:
    """The copies of all lanes, made as the test says."""
    made = Copies()
    with copied_by(made):
        yield made


@pytest.fixture
def native_code(tmp_path: Path) -> Iterator[NativeCode]:
    """A process that has not loaded the native code, with an empty cache."""
    with not_loaded(tmp_path) as code:
        yield code


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
