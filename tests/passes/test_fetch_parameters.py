from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.passes.capture import OFFLOADED, Capture, Small, inputs
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.fetch_parameters import fetch_order, fetch_parameters
from zenflow_compile.runtime import ops

PASSES = dict.fromkeys((Phase.FORWARD, Phase.INFERENCE), (fetch_parameters,))


def test_fetches_right_before_first_use(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = model(x)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    out = capture.run(model, x)
    forward = capture.after[Phase.FORWARD]
    fetches = forward.graph.find_nodes(op="call_function", target=ops.COPY_TO_DEVICE_)
    assert [node.args[-1] for node in fetches] == fetch_order(forward, engine.id) == [1, 3, 0]
    for fetch in fetches:
        order = list(forward.graph.nodes)
        first = min((user for user in fetch.args[0].users if user is not fetch), key=order.index)
        assert fetch.next is first
    assert engine.runs("copy_to_device_") == dict.fromkeys(OFFLOADED, 1)
    torch.testing.assert_close(out, expected)
    capture.assert_idempotent(Phase.FORWARD)


def test_inference_graphs_fetch_too(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    engine = recording(model)
    capture = Capture(engine, PASSES)
    with torch.no_grad():
        torch.testing.assert_close(capture.run(model, x), model(x))
    assert capture.counts[Phase.INFERENCE] == (("fetch_parameters", 3),)
    assert engine.runs("copy_to_device_") == dict.fromkeys(OFFLOADED, 1)


def test_forward_reads_the_fetched_values(recording: Callable[..., RecordingEngine]) -> None:
    """The write is in place: this forward reads the new values, through views as well, and so does the caller."""
    model, x = Small(), inputs()

    class UploadScheduler(RecordingEngine):
        def copy_to_device_(self, p: int, param: torch.Tensor) -> None:
            super().copy_to_device_(p, param)
            with torch.no_grad():
                param.mul_(2)

    engine = UploadScheduler(model.named_parameters())
    out = Capture(engine, PASSES).run(model, x)
    torch.testing.assert_close(out, model(x))
    engine.close()


def test_resident_parameters_are_not_fetched(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.LayerNorm(4)
    capture = Capture(recording(model), PASSES)
    capture.run(model, torch.randn(2, 4))
    assert str(capture.after[Phase.FORWARD].graph) == capture.before[Phase.FORWARD]
