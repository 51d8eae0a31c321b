"""The profiler shows a deliberate wait of a real engine as a stall in the summary."""

from __future__ import annotations

import time

from torch import Tensor

import zenflow_compile as zf
from tests.support.copies import copied_by
from tests.support.training import EAGER_BACKEND, Training
from zenflow_compile.runtime.device.thread_lane import copy_without_gil

SLOW_MS = 30.0


def test_slow_copies_count_as_stall() -> None:
    training = Training(EAGER_BACKEND, {"update_interval": 1}).run(0, 3)

    def slowly(target: Tensor, source: Tensor) -> None:
        time.sleep(SLOW_MS / 1e3)  # the stall that the report has to show
        copy_without_gil(target, source)

    with copied_by(slowly), zf.profile(training.optimizer) as profile:
        training.run(3, 9)
    summary = profile.summary()
    offloaded = len(training.optimizer.engine.offloaded)
    assert offloaded >= 2
    assert summary["steps"] == 6
    assert summary["d2h_bytes_per_step"] > 0
    assert summary["windows_flushed"] == 6 * offloaded
    # A lane copies in turn, each way: a step sleeps 2 * offloaded times, and little else could be waited beneath.
    assert summary["stall_ms_per_step"] > SLOW_MS
