"""The backend over a zoo of models, with an engine that only records: gradients must be eager's, parameter by
parameter, and every node must have run for the parameter that it names."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint

from tests.support.calls import Call, at_calls
from tests.support.recording import RecordingEngine
from zenflow_compile.backend import ServedGraph, rewrite_and_record, zenflow
from zenflow_compile.compiler.ownership import engines_of, optimizer_of
from zenflow_compile.passes.base import Phase
from zenflow_compile.planning.plan import Placement

EAGER = {"inner": "eager"}
BOTH = [
    pytest.param({"inner": "eager"}, id="eager"),
    pytest.param({}, id="inductor"),
]


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Tied(nn.Module):
    """Embedding and head share a weight; the block between them is recomputed in the backward."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(11, 8)
        self.block = MLP(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.checkpointed else self.block(hidden)
        return self.head(hidden)


class Broken(nn.Module):
    """Graph breaks, and a weight that graphs before and after one share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        x = torch.tanh(self.second(x))
        torch._dynamo.graph_break()
        return self.first(x)


class Experts(nn.Module):
    """Two experts of which one gets no tokens, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class Sum(nn.Module):
    """Gradients that are the same node, an input of the backward, or a broadcast of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ (self.a + self.b).t() + x.sum(), self.c * 1.0 + self.a


def vectors(rows: int = 4, width: int = 8) -> Tensor:
    return torch.randn(rows, width)


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (MLP, vectors),
    "conv": (ConvNet, lambda: torch.randn(2, 3, 5, 5)),
    "tied": (Tied, lambda: torch.randint(11, (2, 6))),
    "broken": (Broken, vectors),
    "experts": (Experts, vectors),
    "sum": (Sum, vectors),
}


def total(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    outs = out if isinstance(out, tuple) else (out,)
    return sum((each.float().pow(2).sum() for each in outs), torch.zeros(()))


def check(model: nn.Module, engine: RecordingEngine, reference: nn.Module, **tolerance: float) -> None:
    """Gradients that stayed and gradients that were handed over are those of eager, all parameters together."""
    names = dict(model.named_parameters())
    for name, expected in reference.named_parameters():
        param = names[name]
        got = engine.gradient(param)
        assert got is None or param.grad is None, f"{name} has a gradient in two places"
        got = param.grad if got is None else got
        assert (got is None) == (expected.grad is None), name
        if got is not None:
            torch.testing.assert_close(got, expected.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def train(compiled: Any, reference: nn.Module, inputs: Iterable[Tensor]) -> None:
    for x in inputs:
        total(compiled(x)).backward()
        total(reference(x)).backward()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("name", ZOO)
def test_models_equal_adamw(name: str, options: dict[str, Any], recording: Callable[..., RecordingEngine]) -> None:
    make, batch = ZOO[name]
    model = make()
    reference = copy.deepcopy(model)
    engine = recording(model)
    train(torch.compile(model, backend=zenflow, options=options), reference, [batch() for _ in range(3)])
    check(model, engine, reference, rtol=1e-4, atol=1e-4)
    ran = {p for p, param in enumerate(engine.params) if engine.plan.params[p].offloaded and p in engine.received}
    assert ran, "nothing was offloaded"
    assert set(engine.runs("offload_gradients")) == ran
    assert all(count >= 3 for count in engine.runs("fetch_parameters_").values())
    assert not engine.runs("update_parameters"), "updates belong to step()"


@pytest.mark.parametrize("options", BOTH)
def test_order_of_ops(options: dict[str, Any], recording: Callable[..., RecordingEngine]) -> None:
    """Each gradient is split and sent before the next one; fetches come in the order of first use."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine = recording(model, finalizes_in_backward=True)
    compiled = torch.compile(model, backend=zenflow, options=options)
    compiled(vectors()).sum().backward()
    assert engine.orders == [[0, 2, 4, 6]]
    assert [p for op, p in engine.trace if op == "fetch_parameters_"] == [0, 2, 4, 6]
    backward = engine.trace[4:]
    assert backward[0] == ("begin_backward", None)
    # Small ones share ops, and are updated after the last of their reads; the first weight is no input here.
    assert backward[1:] == [
        *(("offload_gradients", p) for p in (6, 4, 2, 0)),
        *(("update_parameters", p) for p in (6, 4, 2)),
    ]


def test_dynamic_shapes(recording: Callable[..., RecordingEngine]) -> None:
    model = ConvNet()
    reference = copy.deepcopy(model)
    engine = recording(model)
    compiled = torch.compile(model, backend=zenflow, options=EAGER)
    train(compiled, reference, [torch.randn(n, 3, 5, 5) for n in (2, 3, 4, 7)])
    check(model, engine, reference, rtol=1e-4, atol=1e-4)
    assert {graph.compile_id for graph in engine.graphs} == {"0/0", "0/1"} or len(engine.graphs) == 4


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_two_models_of_one_class(dynamic: bool, interleaved: bool, recording: Callable[..., RecordingEngine]) -> None:
    """Same code, same shapes, no reset: each graph must run with its own parameters (RecordingEngine checks it)."""
    models = [MLP(), MLP()]
    references = copy.deepcopy(models)
    engines = [recording(model) for model in models]
    compiled = [torch.compile(m, backend=zenflow, options=EAGER, dynamic=dynamic) for m in models]
    order = [0, 1, 0, 1, 1, 0] if interleaved else [0, 0, 0, 1, 1, 1]
    for rows, i in enumerate(order, start=3):
        train(compiled[i], references[i], [vectors(rows if dynamic else 4)])
    for model, engine, reference in zip(models, engines, references, strict=True):
        check(model, engine, reference)
        assert engine.runs("offload_gradients") == {0: 3, 2: 3}


def test_weights_of_later_models_are_static(recording: Callable[..., RecordingEngine]) -> None:
    """Else Inductor reads the address of each weight at every call on a GPU: it has none while in host memory."""
    static: list[list[int]] = []

    def note(call: Call) -> None:
        if call.arguments["ctx"].phase is Phase.FORWARD:
            static.append(list(TracingContext.get().fw_metadata.static_input_indices))

    models = [MLP(), MLP()]
    with at_calls(note, rewrite_and_record):
        for model in models:
            recording(model)
            torch.compile(model, backend=zenflow, options=EAGER)(vectors()).sum().backward()
    first, second = static
    assert first == second
    assert len(first) == len(list(models[0].parameters()))


def test_twelve_layers_behind_breaks(recording: Callable[..., RecordingEngine]) -> None:
    class Layer(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x

    model = nn.Sequential(*(Layer() for _ in range(12)))
    reference = copy.deepcopy(model)
    engine = recording(model)
    train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors() for _ in range(3)])
    check(model, engine, reference, rtol=1e-4, atol=1e-4)
    assert engine.runs("offload_gradients") == dict.fromkeys(engine.offloaded(), 3), "some layers fell back to eager"


def test_twelve_layers_in_a_loop_with_breaks(recording: Callable[..., RecordingEngine]) -> None:
    """All layers share a resume function, which is compiled more often than Dynamo's default limit."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MLP() for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model = Stack()
    reference = copy.deepcopy(model)
    engine = recording(model)
    train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors() for _ in range(2)])
    check(model, engine, reference, rtol=1e-4, atol=1e-4)


def test_each_layer_compiled_separately(recording: Callable[..., RecordingEngine]) -> None:
    model = nn.Sequential(*(MLP() for _ in range(12)))
    reference = copy.deepcopy(model)
    engine = recording(model)
    layers = [torch.compile(layer, backend=zenflow, options=EAGER) for layer in model]

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    train(run, reference, [vectors() for _ in range(3)])
    check(model, engine, reference, rtol=1e-4, atol=1e-4)
    assert engine.runs("offload_gradients") == dict.fromkeys(engine.offloaded(), 3)


def test_module_compiled_in_place(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    engine = recording(model)
    model.compile(backend=zenflow, options=EAGER)
    train(model, reference, [vectors()])
    check(model, engine, reference)
    assert optimizer_of(model) is engine


def test_backend_is_found_by_name(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    engine = recording(model)
    torch.compile(model, backend="zenflow", options=EAGER)(vectors()).sum().backward()
    assert engine.runs("offload_gradients") == {0: 1, 2: 1}


def test_code_of_dead_models_is_dropped() -> None:
    """More models of one class than Dynamo's recompile limit: each is served, and the code of dead ones goes."""
    elsewhere = served_graphs()  # other tests' graphs that something still holds
    for _ in range(12):
        model = MLP()
        engine = RecordingEngine(model.named_parameters())
        torch.compile(model, backend=zenflow, options=EAGER)(vectors()).sum().backward()
        assert engine.runs("offload_gradients") == {0: 1, 2: 1}
        del model, engine
        gc.collect()
    graph, *more = [each for each in served_graphs() if all(each is not other for other in elsewhere)]
    assert not more
    assert len(graph._variants) == 1


def served_graphs() -> list[ServedGraph]:
    return [each for each in gc.get_objects() if type(each) is ServedGraph]


def test_evaluation_only_fetches(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    engine = recording(model)
    compiled = torch.compile(model, backend=zenflow, options=EAGER)
    x = vectors()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert engine.executed == {("fetch_parameters_", 0): 1, ("fetch_parameters_", 2): 1}


def test_frozen_parameters(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    model.up.requires_grad_(False)
    reference = copy.deepcopy(model)
    engine = recording(model)
    train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors()])
    check(model, engine, reference)
    assert model.up.weight.grad is None
    assert [param.name for param in engine.plan.params] == ["down.weight", "down.bias"]


def test_parameters_without_an_owner_train_normally() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors()])
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)


def test_two_optimizers_in_one_graph(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    engines = [recording(model.up), recording(model.down)]
    train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors()])
    check(model.up, engines[0], reference.up)
    check(model.down, engines[1], reference.down)
    assert len(engines_of(model)) == 2
    with pytest.raises(ValueError, match="2 optimizers"):
        optimizer_of(model)


def test_change_of_owners_recompiles(recording: Callable[..., RecordingEngine]) -> None:
    """A graph serves the optimizers that it was compiled for: late, closed and new ones get their own."""
    model = MLP()
    compiled = torch.compile(model, backend=zenflow, options=EAGER)
    x = vectors()
    compiled(x).sum().backward()
    assert model.up.weight.grad is not None
    model.zero_grad()
    for _ in range(2):
        engine = RecordingEngine(model.named_parameters())
        compiled(x).sum().backward()
        assert model.up.weight.grad is None
        assert engine.runs("offload_gradients") == {0: 1, 2: 1}
        engine.close()
    compiled(x).sum().backward()
    assert model.up.weight.grad is not None


def test_host_parameters_have_no_column_update(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    engine = recording(model, placement=Placement.HOST, finalizes_in_backward=True)
    torch.compile(model, backend=zenflow)(vectors()).sum().backward()
    # RecordingEngine checks that no parameter comes along; 2 is the weight that this backward has as an input.
    assert engine.runs("update_parameters") == {2: 1}


def test_autocast(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    engine = recording(model)
    with torch.autocast("cpu", torch.bfloat16):
        train(torch.compile(model, backend=zenflow, options=EAGER), reference, [vectors()])
    check(model, engine, reference, rtol=0.05, atol=0.05)


def test_state_dict_applies_due_updates(recording: Callable[..., RecordingEngine]) -> None:
    model = Tied()
    engine = recording(model)
    torch.compile(model, backend=zenflow, options=EAGER)(torch.randint(11, (2, 3)))
    model.state_dict()
    assert engine.synchronized > 0
    hooks = [len(module._state_dict_pre_hooks) for module in model.modules()]
    torch.compile(model, backend=zenflow, options=EAGER)(torch.randint(11, (2, 9)))
    assert hooks == [len(module._state_dict_pre_hooks) for module in model.modules()], "hooks pile up"
    copy.deepcopy(model).state_dict()


def test_models_can_be_collected() -> None:
    """Compiled graphs, which Dynamo keeps, must hold neither model nor engine."""
    model = MLP()
    engine = RecordingEngine(model.named_parameters())
    torch.compile(model, backend=zenflow, options=EAGER)(vectors()).sum().backward()
    references = [weakref.ref(model), weakref.ref(engine)]
    del model, engine
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("optimize_ddp", [True, False])
@pytest.mark.parametrize("compiled_inside", [False, True])
def test_ddp_is_refused(compiled_inside: bool, optimize_ddp: bool, recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    engine = recording(model)
    ddp = torch.nn.parallel.DistributedDataParallel
    if compiled_inside:
        wrapped: Any = ddp(torch.compile(model, backend=zenflow, options=EAGER))
    else:
        wrapped = torch.compile(ddp(model), backend=zenflow, options=EAGER)
    with (
        torch._dynamo.config.patch(optimize_ddp=optimize_ddp),
        pytest.raises(ValueError, match=r"DistributedDataParallel.*model\.module"),
    ):
        wrapped(vectors())
    assert not engine.executed
    assert not engine.graphs


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"topk_ratoi": 0.1}, TypeError, "topk_ratio"),
        ({"topk_ratio": 2.0}, ValueError, "topk_ratio"),
        ({"inner": "eagre"}, ValueError, "inner"),
    ],
)
def test_errors_of_options_are_not_wrapped(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        torch.compile(MLP(), backend=zenflow, options=options)(vectors())


def test_freezing_is_refused(recording: Callable[..., RecordingEngine]) -> None:
    model = MLP()
    recording(model)
    with pytest.raises(ValueError, match="freezing"):
        torch.compile(model, backend=zenflow, options={"freezing": True})(vectors())
