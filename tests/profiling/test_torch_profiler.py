"""``torch.profiler`` shows the phases of a training step."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from tests.support.training import EAGER_BACKEND, Training


def test_step_shows_phases_and_parameters() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 2)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        training.run(2, 4)
    training.optimizer.close()
    names = [event.name for event in recorded.events()]
    assert names.count("zenflow::step") == 2
    for phase in ("offload", "flush", "apply"):
        assert any(name.startswith(f"zenflow::{phase} (") and "0.weight" in name for name in names), phase


def test_no_profiler_leaves_no_event() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1})
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pass
    training.run(0, 2)
    training.optimizer.close()
    assert not [event for event in recorded.events() if event.name.startswith("zenflow::")]
