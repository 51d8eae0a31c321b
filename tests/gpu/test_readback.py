"""Values are copied to the host during the device's work: the host waits for them only if they are late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.training import assert_same, make_model, offloading, train
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.readback import Readback, Reading
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def synchronizing_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("synchronizing_raises")
def test_start_does_not_wait_and_values_do() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = Recorder(device_of(device).streams)
    recorder.attach(Timeline(max_events=100))
    values = Readback(2, device_of(device), recorder)
    values.grow(3)
    for round_number in range(5):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds, before the cell has its value
        values.cell(1, 1).fill_(float(round_number))
        reading = values.start()
        passed = torch.cuda.Event()
        passed.record()
        assert not passed.query()  # nothing was waited for so far
        torch.cuda._sleep(50_000_000)
        values.cell(1, 1).fill_(-1.0)  # of the next step; the copy comes first on the stream
        assert reading.values() == {(1, 1): float(round_number)}
        values.forget()
    assert recorder.timeline is not None
    assert sum(event.kind == "wait" for event in recorder.timeline.events()) == 5


def test_adaptive_windows_and_drift_are_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal runs, and one with a device that is late at every step, give the same numbers."""
    start = Readback.start

    def late(values: Readback) -> Reading:
        torch.cuda._sleep(5_000_000)
        return start(values)

    found = []
    for delayed in (False, False, True):
        with monkeypatch.context() as patch:
            if delayed:
                patch.setattr(Readback, "start", late)
            model = make_model()
            with offloading(model, update_interval=(1, 4)) as optimizer:
                found.append(train(model, optimizer, compiled=False))
                assert optimizer.engine.steps.windows_flushed > 0
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_time_is_measured_on_the_device() -> None:
    model = make_model()
    with offloading(model, update_interval="auto") as optimizer:
        train(model, optimizer, compiled=False)
        bounds = optimizer.engine.schedule.adaptive_windows
        assert bounds is not None
        assert bounds.measured
        assert bounds.shortest is not None
        assert 1 <= bounds.shortest <= 4
