"""PyTorch's own tools show the passes: structured traces, source lines in graphs, profiler events."""

from __future__ import annotations

import inspect
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from runpy import run_path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zenflow_compile
from tests.passes.capture import Capture, Small, inputs
from tests.support.calls import calls_of
from tests.support.recording import RecordingEngine
from zenflow_compile.backend import zenflow
from zenflow_compile.passes.base import Phase
from zenflow_compile.passes.pipeline import PIPELINES, SOURCES, source_hash
from zenflow_compile.runtime.ops import event_name
from zenflow_compile.torch_internals import torch_private_compiler as private

Recording = Callable[..., RecordingEngine]


class Artifacts(logging.Handler):
    """The text artifacts of the structured trace, by name, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        metadata = json.loads(json.dumps(record.metadata)).get("artifact")  # type: ignore[attr-defined]
        if metadata is not None:
            assert metadata["encoding"] == "string"
            self.texts[metadata["name"]] = record.payload  # type: ignore[attr-defined]


@pytest.fixture
def artifacts() -> Iterator[dict[str, str]]:
    """Handles the log that ``TORCH_TRACE`` and tlparse read, as ``TORCH_TRACE`` does."""
    handler, trace_log = Artifacts(), logging.getLogger("torch.__trace")
    level = trace_log.level
    trace_log.addHandler(handler)
    trace_log.setLevel(logging.DEBUG)
    yield handler.texts
    trace_log.removeHandler(handler)
    trace_log.setLevel(level)


def test_trace_has_the_graph_after_each_pass(artifacts: dict[str, str], recording: Recording) -> None:
    model = Small()
    engine = recording(model, finalizes_in_backward=True)
    torch.compile(model, backend=zenflow, options={"inner": "eager"})(inputs()).sum().backward()
    ours = {name: text for name, text in artifacts.items() if name.startswith("zenflow_")}
    expected = [
        f"zenflow_{phase}_engine{engine.id}_{moment}"
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for moment in ("before", *(f"after_{each.__name__}" for each in PIPELINES[phase]))
    ]
    assert list(ours) == expected
    backward = {name.rpartition(f"{engine.id}_")[2]: text for name, text in ours.items() if "backward" in name}
    assert "zenflow" not in backward["before"]
    assert re.match(r"# offload_gradients: 3 edits in \d+\.\d+ ms\n", backward["after_offload_gradients"])
    assert "zenflow.offload_gradients" not in backward["after_order_gradients"]
    assert "zenflow.offload_gradients" in backward["after_offload_gradients"]


def test_graphs_are_printed_only_for_a_trace(recording: Recording) -> None:
    model = Small()
    recording(model)
    no_trace = mock.patch.object(logging.getLogger("torch.__trace"), "handlers", [])
    with no_trace, calls_of(private.printed_graph) as printed:
        torch.compile(model, backend=zenflow, options={"inner": "eager"})(inputs()).sum().backward()
    assert printed == []


class OneLine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return x @ self.down


@pytest.mark.parametrize("grouped", [False, True])
def test_inserted_nodes_show_the_users_line(
    grouped: bool, recording: Recording, request: pytest.FixtureRequest
) -> None:
    if not grouped:
        request.getfixturevalue("ungrouped")
    model = OneLine()
    engine = recording(model, finalizes_in_backward=True)
    capture = Capture(engine, PIPELINES)
    capture.run(model, torch.randn(3, 8, requires_grad=True))
    lines, first = inspect.getsourcelines(OneLine.forward)
    offset = 1 if grouped else 2  # a group shows the line of its last gradient, which is the first layer's
    for graph in (capture.after[Phase.FORWARD], capture.after[Phase.BACKWARD]):
        inserted = [node for node in graph.graph.nodes if str(node.target).startswith("zenflow.")]
        served = [node for node in inserted if "begin_backward" not in node.name]
        assert served
        for node in served:
            assert node.meta["stack_trace"]
            assert node.meta["from_node"][-1].pass_name == "zenflow"
    backward = capture.after[Phase.BACKWARD]
    before, _, _ = private.printed_graph(backward).partition("zenflow.offload_gradients")
    shown = [line for line in before.splitlines() if "# File:" in line][-1]
    assert f"{__file__}:{first + offset}" in shown
    assert lines[offset].partition("#")[0].strip() in shown


@pytest.mark.usefixtures("ungrouped")
def test_nodes_have_the_module_path(recording: Recording) -> None:
    model = OneLine()
    capture = Capture(recording(model), PIPELINES)
    capture.run(model, torch.randn(3, 8))
    nodes = capture.after[Phase.FORWARD].graph.nodes
    (fetch,) = (node for node in nodes if node.name == "fetch_parameters_1")
    assert any("up" in path for path, _ in fetch.meta["nn_module_stack"].values())


def test_source_hash_follows_the_passes(tmp_path: Path) -> None:
    package = Path(zenflow_compile.__file__).parent
    twin = tmp_path / "zenflow_compile"
    shutil.copytree(package, twin, ignore=shutil.ignore_patterns("__pycache__"))

    def hash_of_twin() -> str:
        found: str = run_path(str(twin / "passes" / "pipeline.py"))["source_hash"]()
        return found

    assert hash_of_twin() == hash_of_twin() == source_hash()
    for pattern in SOURCES:
        edited = sorted(twin.glob(pattern))[0]
        before, text = hash_of_twin(), edited.read_text()
        edited.write_text(text + "\n# edited\n")
        assert hash_of_twin() != before
        edited.write_text(text)
        assert hash_of_twin() == before
    (twin / "options" / "options.py").write_text("# not part of it\n")
    assert hash_of_twin() == source_hash()


def test_cache_key_contains_the_source_hash() -> None:
    graph = torch.fx.Graph()
    assert private.cache_note(graph, "one") != private.cache_note(graph, "other")
    assert private.cache_note(graph, source_hash())["zenflow"] == source_hash()


def test_profiler_shows_phases_and_parameters(recording: Recording) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    recording(model, finalizes_in_backward=True)
    compiled = torch.compile(model, backend=zenflow, options={"inner": "eager"})
    x = torch.randn(3, 8)
    compiled(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        compiled(x).sum().backward()
    names = {event.name for event in recorded.events()}
    assert {
        "zenflow::fetch (0.weight, 2.weight)",
        "zenflow::offload (2.weight, 0.weight)",
        "zenflow::update (2.weight)",
    } <= names


def test_events_of_many_parameters_are_short() -> None:
    assert event_name("update", ()) == "zenflow::update"
    assert event_name("flush", [f"p{i}" for i in range(10)]) == "zenflow::flush (p0, p1, p2, p3, p4, p5, p6, p7, +2)"
