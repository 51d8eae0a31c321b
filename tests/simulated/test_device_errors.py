"""A device that dies, and drivers and systems that lack something."""

from __future__ import annotations

import threading
import warnings

import pytest

from tests.simulated.accelerator import serve
from tests.simulated.cases import Case, Loop, Outcome, train
from tests.simulated.process import SimulatedProcess, in_simulator
from tests.simulated.simulator import Simulator, load_simulator
from zenflow_compile.cli import doctor
from zenflow_compile.runtime.parameters import allocation


def die(entry: str, *, in_flight: bool, values: bool = True) -> str:
    """Train, let the device die, go on, and close. Returns what training raised.

    Args:
        in_flight: gradients of an update that is queued are still on their way then.
        values: the device has stream values.
    """
    serve()
    simulator = load_simulator()
    simulator.configure(stream_values=values)
    loop = Loop(Case("exact", entry=entry), simulator.device)
    for step in range(4):
        loop.step(step)
    transport = loop.optimizer.engine.registry.transport
    if in_flight:
        simulator.delay(transport.to_host.stream, 0.99999)
        # From another thread: this one may be in a wait for the gradients by then.
        threading.Timer(0.5, simulator.die, ("illegal memory access",)).start()
    else:
        loop.optimizer.synchronize()
        simulator.die("illegal memory access")
    try:
        while True:
            loop.step(4)
    except RuntimeError as error:
        raised = reasons(error)
    with pytest.raises(RuntimeError) as closed:
        loop.optimizer.close()
    assert "illegal memory access" in reasons(closed.value), reasons(closed.value)
    return raised


def reasons(error: BaseException | None) -> str:
    """The texts of an error and of those that it is chained to."""
    return "" if error is None else f"{error}\n{reasons(error.__cause__)}"


@pytest.mark.parametrize("entry", ["graph", "hooks"])
def test_dead_device_raises_and_closes(simulated: SimulatedProcess, entry: str) -> None:
    assert "illegal memory access" in simulated.call(die, entry, in_flight=False, timeout=30)


@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize("entry", ["graph", "hooks"])
def test_dead_device_fails_queued_jobs(simulated: SimulatedProcess, entry: str, values: bool) -> None:
    """Their gradients will never arrive: workers ask the device from time to time."""
    raised = simulated.call(die, entry, in_flight=True, values=values, timeout=30)
    assert "illegal memory access" in raised


@pytest.mark.parametrize("lack", ["stream_values", "registering", "pinning"])
@in_simulator
def test_lack_is_said_once_and_costs_time_alone(simulator: Simulator, lack: str) -> None:
    serve()
    allocation.warn_once.cache_clear()
    case = Case("windows", steps=5)
    expected: Outcome = train(case, "cpu")
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            lacking = {lack: False, "registering": False} if lack == "pinning" else {lack: False}
            simulator.configure(**lacking)  # type: ignore[arg-type]
            loop = Loop(case, simulator.device)
            losses.append([float(loop.step(step)) for step in range(case.steps)])
            loop.close()
    assert losses == [expected.losses] * 2, (losses, expected.losses)
    said = [str(each.message) for each in caught if "as correct" in str(each.message)]
    texts = {"stream_values": "no stream memory operations", "pinning": "refused to pin"}
    counts = {name: sum(text in each for each in said) for name, text in texts.items()}
    # Unpinned memory has no stream values, either. It is said for every optimizer, with the remedies of its options.
    assert (
        counts
        == {
            "stream_values": {"stream_values": 1, "pinning": 0},
            "registering": {"stream_values": 0, "pinning": 0},
            "pinning": {"stream_values": 1, "pinning": 2},
        }[lack]
    )


@in_simulator
def test_doctor_shows_what_is_lacking(simulator: Simulator) -> None:
    serve()
    simulator.configure()
    assert doctor.machine(simulator.device).abilities["stream values"] == "yes"
    simulator.configure(stream_values=False)
    assert doctor.machine(simulator.device).abilities["stream values"].startswith("no: each forward waits")
