from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from tests.passes.capture import OFFLOADED, UNFUSED, Capture, Small, inputs, reference_gradients
from tests.support.recording import RecordingEngine
from tests.support.training import EAGER_BACKEND, Training, assert_same
from tests.support.trajectories import largest_difference, train_in_backward
from tests.support.zoo import BY_NAME
from zenflow_compile.passes import group_nodes as grouping
from zenflow_compile.passes import pipeline
from zenflow_compile.passes.base import PassContext, Phase
from zenflow_compile.passes.fetch_parameters import fetch_order
from zenflow_compile.passes.graph_edits import written_inputs
from zenflow_compile.passes.group_nodes import group_nodes
from zenflow_compile.passes.pipeline import PIPELINES
from zenflow_compile.passes.update_parameters import build_step_graph
from zenflow_compile.planning.plan import Placement
from zenflow_compile.runtime import ops

UNFUSED_OPS = (
    ops.COLUMN_NORMS, ops.SELECT_COLUMNS, ops.SPLIT_COLUMNS, ops.COPY_TO_HOST,
    ops.ADAM_COLUMNS_, ops.UPDATE_ON_HOST, ops.COPY_TO_DEVICE_,
)  # fmt: skip


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_and_updates_are_grouped(in_backward: bool, recording: Callable[..., RecordingEngine]) -> None:
    model, x = Small(), inputs()
    expected = reference_gradients(model, x)
    engine = recording(model, finalizes_in_backward=in_backward)
    capture = Capture(engine, PIPELINES)
    capture.run(model, x)

    assert not any(capture.count(phase, op) for phase in capture.after for op in UNFUSED_OPS)
    assert engine.runs("offload_gradients") == dict.fromkeys(OFFLOADED, 1)
    assert engine.runs("fetch_parameters_") == dict.fromkeys(OFFLOADED, 1)
    assert {op for op, _ in engine.executed} <= {
        "begin_backward", "offload_gradients", "fetch_parameters_", "update_parameters",
    }  # fmt: skip
    graph = capture.after[Phase.BACKWARD].graph
    offloads = graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRADIENTS)
    assert [node.args[-1] for node in offloads] == engine.offloads == [[0, 3, 1]]
    for node in offloads:
        grads, token, *_ = node.args
        assert token.target is ops.BEGIN_BACKWARD
        assert node.prev is grads[-1], "the last gradient is offloaded as soon as it exists"
    for p in OFFLOADED:
        torch.testing.assert_close(engine.received[p], expected[list(expected)[p]])
    updates = graph.find_nodes(op="call_function", target=ops.UPDATE_PARAMETERS)
    assert len(updates) == in_backward
    for node in updates:
        assert set(engine.runs("update_parameters")) == set(node.args[-1])
        assert written_inputs(graph) == set(node.args[0])
    for phase in capture.after:
        capture.assert_idempotent(phase)


def test_nothing_to_group(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.LayerNorm(4)
    capture = Capture(recording(model), PIPELINES)
    capture.run(model, torch.randn(2, 4))
    assert capture.counts[Phase.BACKWARD][-1] == ("group_nodes", 0)
    assert str(capture.after[Phase.FORWARD].graph) == capture.before[Phase.FORWARD]


def test_chain_with_other_readers_stays(recording: Callable[..., RecordingEngine]) -> None:
    def read_norms(gm: torch.fx.GraphModule, ctx: PassContext) -> int:
        """A user's own pass, which reads one parameter's norms."""
        norms = gm.graph.find_nodes(op="call_function", target=ops.COLUMN_NORMS)[0]
        with gm.graph.inserting_after(norms):
            gm.graph.call_function(torch.ops.aten.sum.default, (norms,))
        return 0

    model = Small()
    engine = recording(model)
    *unfused, fuse = PIPELINES[Phase.BACKWARD]
    capture = Capture(engine, {Phase.BACKWARD: (*unfused, read_norms, fuse)})
    capture.run(model, inputs())
    assert capture.count(Phase.BACKWARD, ops.COLUMN_NORMS) == capture.count(Phase.BACKWARD, ops.COPY_TO_HOST) == 1
    (fused,) = capture.after[Phase.BACKWARD].graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRADIENTS)
    assert len(fused.args[-1]) == 2


@pytest.mark.parametrize("placement", [Placement.SPLIT_COLUMNS, Placement.HOST])
def test_updates_of_all_parameters(placement: Placement, recording: Callable[..., RecordingEngine]) -> None:
    engine = recording(Small(), placement=placement)
    step = build_step_graph(engine.plan, engine.id)
    ctx = PassContext(plan=engine.plan, engine_id=engine.id, phase=Phase.BACKWARD, params=())
    assert group_nodes(step, ctx) == 1
    step.recompile()
    assert step(*(engine.params[p] for p in engine.offloaded())) == ()
    assert engine.executed == {("update_parameters", p): 1 for p in OFFLOADED}
    assert len(step.graph.find_nodes(op="call_function", target=ops.UPDATE_PARAMETERS)) == 1


def test_update_in_two_places_stays_unfused(
    recording: Callable[..., RecordingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "SMALL_BYTES", 0)
    engine = recording(Small())
    graph = Graph()
    a, token = graph.placeholder("a"), graph.placeholder("token")
    graph.call_function(ops.ADAM_COLUMNS_, (a, token, engine.id, 0))
    graph.call_function(torch.ops.aten.zeros.default, ([1],))
    graph.call_function(ops.UPDATE_ON_HOST, (token, engine.id, 0))
    graph.output(())
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert group_nodes(gm, PassContext(plan=engine.plan, engine_id=engine.id, phase=Phase.BACKWARD, params=())) == 0


class Written:
    """A graph by hand: ``f`` fetches, ``u`` updates, ``v`` makes a view, ``c`` computes, ``g`` is of a gradient.

    ``o`` offloads the next gradient, ``w`` writes to the memory of the first one.
    """

    def __init__(self, engine: RecordingEngine, phase: Phase, steps: str) -> None:
        graph = Graph()
        params = [graph.placeholder(f"param_{p}") for p in range(len(engine.params))]
        token = graph.placeholder("token")
        numbers, offloaded = count(), count()
        grads = [graph.placeholder(f"grad_{p}") for p in range(len(engine.params))]
        for grad in grads:
            grad.meta["val"] = torch.empty(4, 4)
        for step in steps:
            if step == "f":
                p = next(numbers)
                graph.call_function(ops.COPY_TO_DEVICE_, (params[p], engine.id, p))
            elif step == "u":
                p = next(numbers)
                graph.call_function(ops.ADAM_COLUMNS_, (params[p], token, engine.id, p))
                graph.call_function(ops.UPDATE_ON_HOST, (token, engine.id, p))
            elif step == "o":
                p = next(offloaded)
                norms = graph.call_function(ops.COLUMN_NORMS, (grads[p], engine.id, p))
                selected = graph.call_function(ops.SELECT_COLUMNS, (norms, engine.id, p))
                graph.call_function(ops.SPLIT_COLUMNS, (grads[p], token, selected, engine.id, p))
                graph.call_function(ops.COPY_TO_HOST, (token, engine.id, p))
            elif step == "w":
                graph.call_function(torch.ops.aten.zero_.default, (grads[0],))
            elif step == "g":
                graph.call_function(ops.COPY_TO_HOST, (token, engine.id, 0))
            else:
                target = {"v": torch.ops.aten.permute, "c": torch.ops.aten.relu}[step].default
                graph.call_function(target, (params[0],))
        graph.output(())
        self.gm = torch.fx.GraphModule(nn.Module(), graph)
        self.ctx = PassContext(plan=engine.plan, engine_id=engine.id, phase=phase, params=())

    def fused(self) -> str:
        """Return the steps after fusion, with the parameters of each fused op."""
        letters = {
            torch.ops.aten.permute.default: "v",
            torch.ops.aten.relu.default: "c",
            torch.ops.aten.zero_.default: "w",
            ops.COPY_TO_HOST: "g",
        }
        found = ""
        for node in self.gm.graph.nodes:
            if node.op == "call_function":
                brackets = "[]" if node.target is ops.OFFLOAD_GRADIENTS else "()"
                found += letters.get(node.target) or "".join(str(p) for p in node.args[-1]).join(brackets)
        return found


@pytest.mark.parametrize(
    ("phase", "steps", "small_bytes", "together_bytes", "fused"),
    [
        (Phase.FORWARD, "fvfvfcc", 0, 0, "(012)vvcc"),  # only views between them
        (Phase.FORWARD, "fcfvfc", 0, 0, "(0)c(12)vc"),  # computation between them hides what follows
        (Phase.FORWARD, "fcfcfc", 64, 1000, "(012)ccc"),  # small
        (Phase.FORWARD, "fcfcfc", 63, 1000, "(0)c(1)c(2)c"),
        (Phase.FORWARD, "fcfcfc", 64, 64, "(01)cc(2)c"),  # small, but not together
        (Phase.FORWARD, "cfcfvf", 64, 128, "c(012)cv"),
        # Only later than where an update stands is behind the parameter's last read.
        (Phase.BACKWARD, "cuuguc", 0, 0, "cg(012)c"),  # nothing of the model's between them
        (Phase.BACKWARD, "ucuuc", 0, 0, "(0)c(12)c"),
        (Phase.BACKWARD, "ucucuc", 64, 1000, "cc(012)c"),  # small
        (Phase.BACKWARD, "ucucuc", 63, 1000, "(0)c(1)c(2)c"),
        (Phase.BACKWARD, "ucucuc", 64, 64, "c(01)c(2)c"),  # small, but not together
    ],
)
def test_fetch_and_update_groups(
    phase: Phase,
    steps: str,
    small_bytes: int,
    together_bytes: int,
    fused: str,
    recording: Callable[..., RecordingEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrices of 64 bytes."""
    monkeypatch.setattr(grouping, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(grouping, "TOGETHER_BYTES", together_bytes)
    engine = recording(nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)]))
    written = Written(engine, phase, steps)
    before = fetch_order(written.gm, engine.id)
    assert group_nodes(written.gm, written.ctx) == fused.count("(")
    assert written.fused() == fused
    assert fetch_order(written.gm, engine.id) == before == ([0, 1, 2] if phase is Phase.FORWARD else [])
    assert group_nodes(written.gm, written.ctx) == 0


@pytest.mark.parametrize(
    ("steps", "offload_bytes", "fused"),
    [
        ("cococo", 1000, "ccc[012]"),
        ("cococo", 128, "cc[01]c[2]"),  # two matrices are as much as may wait
        ("cococo", 127, "c[0]c[1]c[2]"),
        ("oco", 0, "[0]c[1]"),  # larger than the bound: a separate op
        ("ocouco", 1000, "c[01](0)c[2]"),  # the update of a gradient comes after its offload
        ("ocucoo", 1000, "[0]c(0)c[12]"),
        ("owo", 1000, "[0]w[1]"),  # nothing writes to a gradient before its offload
        ("oowo", 1000, "[01]w[2]"),
    ],
)
def test_offload_groups(
    steps: str,
    offload_bytes: int,
    fused: str,
    recording: Callable[..., RecordingEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrices of 64 bytes, and of no more than ``offload_bytes`` one gradient lives longer than the next one."""
    monkeypatch.setattr(grouping, "OFFLOAD_BYTES", offload_bytes)
    engine = recording(nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)]))
    written = Written(engine, Phase.BACKWARD, steps)
    assert group_nodes(written.gm, written.ctx) == fused.count("(") + fused.count("[")
    assert written.fused() == fused
    assert group_nodes(written.gm, written.ctx) == 0


def test_small_parameters_are_fetched_together(recording: Callable[..., RecordingEngine]) -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), torch.randn(2, 4)
    engine = recording(model)
    expected = model(x)
    out = Capture(engine, PIPELINES).run(model, x)
    torch.testing.assert_close(out, expected)
    assert engine.fetches == [[0, 2, 4, 6, 8]]


OPTIONS = [
    {},
    {"staleness": 1},
    {"update_interval": "auto"},
    {"gradient_accumulation_steps": 2},
    {"max_grad_norm": 0.1},
]


def trained(
    monkeypatch: pytest.MonkeyPatch, unfused: bool, inner: str, **keywords: object
) -> tuple[list[Tensor], set[str]]:
    """Return the weights after 14 steps, and the ops that ran."""
    ran: set[str] = set()
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        if unfused:
            patch.setattr(pipeline, "PIPELINES", UNFUSED)
        entry = {**EAGER_BACKEND, "options": {"inner": inner}}
        training = Training(entry, {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 5, **keywords})
        engine = training.optimizer.engine
        for name in ("split_columns", "offload_gradients", "update_on_host", "update_parameters"):
            patch.setattr(engine, name, noting(ran, name, getattr(engine, name)))
        training.run(0, 14)
        assert engine.selections
        weights = training.weights()
        training.optimizer.close()
    return weights, ran


def noting(ran: set[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def noted(*args: object) -> object:
        ran.add(name)
        return function(*args)

    return noted


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused_ops_have_the_bits_of_unfused_ops(
    options: dict[str, object], inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, fused_ops = trained(monkeypatch, False, inner, **options)
    unfused, unfused_ops = trained(monkeypatch, True, inner, **options)
    assert {"offload_gradients", "update_parameters"} <= fused_ops
    assert "split_columns" not in fused_ops
    assert unfused_ops == {"split_columns", "update_parameters"}, "step() calls the engine, without nodes"
    assert_same(fused, unfused)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_updates_in_backward_have_the_same_bits(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member = BY_NAME["mlp"]
    fused = train_in_backward(member, inner, 10)
    torch._dynamo.reset()
    monkeypatch.setattr(pipeline, "PIPELINES", UNFUSED)
    unfused = train_in_backward(member, inner, 10)
    assert fused.windows_flushed == unfused.windows_flushed > 0
    assert largest_difference(fused, unfused, member) == 0.0
