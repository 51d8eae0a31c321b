from __future__ import annotations

import pytest

from tests.profiling.synthetic import event, recording
from zenflow_compile.profiling.report import render
from zenflow_compile.profiling.summary import block_of, slack_by_block, summarize


@pytest.mark.parametrize(
    ("param", "block"),
    [
        ("layers.3.mlp.up.weight", "layers.3"),
        ("model.layers.12.weight", "model.layers.12"),
        ("4.weight", "4"),
        ("conv1d.weight", "conv1d"),
        ("head", "head"),
        ("param7", "param7"),
    ],
)
def test_block_of(param: str, block: str) -> None:
    assert block_of(param) == block


def flushed() -> list:  # type: ignore[type-arg]
    return [
        # Block 0: the second of two flushes is late by 2 ms, in two tasks.
        event("slack", "slack", 10, 16, step=1, param="layers.0.a"),
        event("worker 0", "host_update", 10, 13, step=1, param="layers.0.a"),
        event("slack", "slack", 50, 56, step=2, param="layers.0.b"),
        event("worker 0", "host_update", 50, 53, step=2, param="layers.0.b"),
        event("worker 1", "host_update", 52, 58, step=2, param="layers.0.b"),
        # Block 1 has time; its third flush has no update within the recording.
        event("slack", "slack", 5, 35, step=1, param="layers.1.a"),
        event("worker 0", "host_update", 13, 17, step=1, param="layers.1.a"),
        event("slack", "slack", 70, 90, step=2, param="layers.1.a"),
        event("step", "step", 0, 40, step=1),
        event("step", "step", 40, 80, step=2),
    ]


def test_slack_and_time_taken_by_block() -> None:
    found = slack_by_block(flushed(), {1, 2})
    assert list(found) == ["layers.0", "layers.1"]
    assert found["layers.0"] == {"slack_ms": 6.0, "taken_ms": 5.5, "margin_ms": -2.0}
    assert found["layers.1"] == {"slack_ms": 30.0, "taken_ms": 12.0, "margin_ms": 18.0}
    assert list(slack_by_block(flushed(), {1})) == ["layers.0", "layers.1"]
    assert slack_by_block(flushed(), {3}) == {}


def test_report_names_the_tightest_block() -> None:
    run = recording(flushed())
    assert list(summarize(run)["slack_by_block"]) == ["layers.0", "layers.1"]
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(run, width=100))
    assert "layers.0: 6.00 ms until its next use, 5.50 ms taken" in capture.get()
    blocking = recording(flushed(), blocking=True)
    with console.capture() as capture:
        console.print(render(blocking, width=100))
    assert "until its next use" not in capture.get()
