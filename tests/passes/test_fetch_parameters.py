from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from tests.passes.capture import LARGE, OFFLOADED, Capture, Small, inputs, params_of
from tests.support.recording import RecordingEngine
from zenflow_compile.passes.base import SMALL_BYTES, Phase
from zenflow_compile.passes.fetch_parameters import fetch_groups, fetch_order, fetch_parameters
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import ops

PASSES = dict.fromkeys((Phase.FORWARD, Phase.INFERENCE), (fetch_parameters,))


def test_fetches_right_before_first_use(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = model(x)
    engine = recording(model)
    capture = Capture(engine, PASSES)
    out = capture.run(model, x)
    forward = capture.after[Phase.FORWARD]
    nodes = list(forward.graph.nodes)
    (fetch,) = forward.graph.find_nodes(op="call_function", target=ops.FETCH_PARAMETERS_)
    assert fetch.args[-1] == fetch_order(forward, engine.id) == [1, 3, 0]
    uses = [user for weight in fetch.args[0] for user in weight.users if user is not fetch]
    assert fetch.next is min(uses, key=nodes.index)
    assert engine.runs("fetch_parameters_") == dict.fromkeys(OFFLOADED, 1)
    torch.testing.assert_close(out, expected)
    capture.assert_idempotent(Phase.FORWARD)


def test_inference_graphs_fetch_too(recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    engine = recording(model)
    capture = Capture(engine, PASSES)
    with torch.no_grad():
        torch.testing.assert_close(capture.run(model, x), model(x))
    assert capture.counts[Phase.INFERENCE] == (("fetch_parameters", 3),)
    assert engine.runs("fetch_parameters_") == dict.fromkeys(OFFLOADED, 1)


def test_forward_reads_the_fetched_values(recording: Callable[..., RecordingEngine]) -> None:
    """The write is in place: this forward reads the new values, through views as well, and so does the caller."""
    model, x = Small(), inputs()

    class UploadScheduler(RecordingEngine):
        def fetch_parameters_(self, ps: Sequence[int], params: Sequence[torch.Tensor]) -> None:
            super().fetch_parameters_(ps, params)
            with torch.no_grad():
                for param in params:
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


@pytest.mark.parametrize(
    ("steps", "size", "grouped"),
    [
        ("fvfvfcc", LARGE, "(012)vvcc"),  # only views between them
        ("fcfvfc", LARGE, "(0)c(12)vc"),  # computation between them hides what follows
        ("fcfcfc", SMALL_BYTES, "(012)ccc"),  # small
        ("fcfcfc", LARGE, "(0)c(1)c(2)c"),
        ("fcfcfcfcfcfc", SMALL_BYTES, "(01234)ccccc(5)c"),  # small, but not together
        ("cfcfvf", SMALL_BYTES, "c(012)cv"),
    ],
)
def test_fetch_groups(steps: str, size: int, grouped: str) -> None:
    """A graph by hand: before the next node ``f`` is fetched; ``v`` makes a view, ``c`` computes."""
    params = params_of(size, steps.count("f"))
    graph = Graph()
    weight = graph.placeholder("weight")
    targets = {"v": torch.ops.aten.permute.default, "c": torch.ops.aten.relu.default}
    names: dict[object, str] = {}
    by_first_use: dict[Node, list[tuple[ParamPlan, Node]]] = {}
    waiting: list[tuple[ParamPlan, Node]] = []
    unfetched = iter(params)
    for step in steps:
        if step == "f":
            waiting.append((next(unfetched), weight))
            continue
        node = graph.call_function(targets[step], (weight,))
        names[node] = step
        by_first_use[node], waiting = waiting, []
    by_first_use[graph.output(())] = waiting
    groups = dict(fetch_groups(graph, by_first_use))
    found = ""
    for node in graph.nodes:
        if node in groups:
            found += "".join(str(param.index) for param, _ in groups[node]).join("()")
        found += names.get(node, "")
    assert found == grouped


def test_small_parameters_are_fetched_together(recording: Callable[..., RecordingEngine]) -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.randn(2, 4)
    engine = recording(model)
    expected = model(x)
    out = Capture(engine, PASSES).run(model, x)
    torch.testing.assert_close(out, expected)
    assert engine.fetches == [[0, 2, 4, 6, 8]]
