"""Graphs that need care with offloaded weights: inputs that share memory, regions, and what a backward recomputes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.support.served_weights import Serving

pytestmark = pytest.mark.timeout(120)

EACH_INNER = pytest.mark.parametrize("inner", ["eager", "inductor"])


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    """Makes serving engines, which give all memory back behind the test."""
    made: list[Serving] = []

    def make(model: nn.Module, budget_bytes: int = 0, *, poisons: bool = True) -> Serving:
        made.append(Serving(model, budget_bytes, poisons=poisons))
        return made[-1]

    yield make
    for engine in made:
        engine.restore()
        engine.close()


def compiled(function: Callable[..., Any], inner: str) -> Callable[..., Any]:
    call: Callable[..., Any] = torch.compile(function, backend="zenflow", options={"inner": inner})
    return call


def saved_bytes(output: Tensor) -> int:
    """Bytes that a compiled forward has saved for its backward, apart from the memory of weights."""
    nodes = [output.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "saved_tensors"):
            return sum(each.untyped_storage().nbytes() for each in node.saved_tensors)
        nodes += [each for each, _ in node.next_functions if each is not None]
    raise AssertionError("no compiled graph made this")


# Inputs.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)


class Pairs(nn.Module):
    """A pair of weights, and a pair that is one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.one = Pair(), Pair()
        self.one.second.weight = self.one.first.weight


def through(pair: Pair, x: Tensor) -> Tensor:
    return pair.second(torch.tanh(pair.first(x)))


@EACH_INNER
def test_graph_is_called_with_one_weight_twice(inner: str, serve: Callable[..., Serving]) -> None:
    """Dynamo has no guard against this: it runs the graph that it captured with two weights."""
    model = Pairs()
    x = torch.randn(3, 8, requires_grad=True)
    expected = [through(pair, x) for pair in (model.two, model.one)]
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in expected]
    engine = serve(model)
    call = compiled(through, inner)
    counters.clear()
    for pair, out, gradient in zip((model.two, model.one), expected, gradients, strict=True):
        found = call(pair, x)
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], gradient)
    assert counters["stats"]["unique_graphs"] == 1
    assert not engine.present


class Leaving(nn.Module):
    """Writes to one of two inputs that share memory, returns weights in several ways, and writes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.written = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.transposed, self.detached = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, shifted: Tensor, x: Tensor, overlapping: Tensor) -> tuple[Tensor, ...]:
        shifted.add_(1)
        x = x + overlapping.sum()
        if not torch.is_grad_enabled():  # with gradients, AOTAutograd fails to trace both writes
            self.written.clamp_(-0.5, 0.5)
        out = x @ self.read @ self.transposed @ self.detached @ self.written
        return out, self.transposed.t(), self.detached.detach()


@EACH_INNER
@pytest.mark.parametrize("grad", [True, False])
def test_weights_that_leave_the_graph_are_kept(inner: str, grad: bool, serve: Callable[..., Serving]) -> None:
    """AOTAutograd numbers inputs anew where they share memory that is written."""
    model, x = Leaving(), torch.randn(2, 8)
    reference = copy.deepcopy(model)
    engine = serve(model)
    found, expected = [], []
    for call, results in ((compiled(model, inner), found), (reference, expected)):
        base = torch.zeros(8)
        with torch.set_grad_enabled(grad):
            results += call(base[:4], x, base[2:6])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert {engine.plan.params[p].name: reason for p, reason in engine.kept.items()} == {
        "transposed": "the forward returns a view of it",
        "detached": "the forward returns a view of it",
        **({} if grad else {"written": "the forward writes it"}),
    }
    if grad:
        sum(each.sum() for each in found).backward()
        sum(each.sum() for each in expected).backward()
        found_grad = engine.gradient(model.transposed) + model.transposed.grad  # in the graph, and of the result
        torch.testing.assert_close(found_grad, reference.transposed.grad)


class Doubled(torch.autograd.Function):
    """Returns a view, and has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad.view(8, 8)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, Doubled.apply(self.weight)


@EACH_INNER
def test_views_of_custom_functions_keep_weights(inner: str, serve: Callable[..., Serving]) -> None:
    model, x = Viewing(), torch.randn(2, 8)
    expected = model.weight.detach().flatten()
    engine = serve(model)
    out, view = compiled(model, inner)(x)
    torch.testing.assert_close(view, expected)
    assert engine.kept == {0: "the forward returns a view of it"}
    (out.sum() + view.sum()).backward()
    torch.testing.assert_close(engine.gradient(model.weight), x.t() @ torch.ones(2, 8) + 2)


# Regions.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: x @ self.left.t(), lambda x: x @ self.right + 1, (x,))
        return found


@EACH_INNER
def test_branches_of_cond_read_loaded_weights(inner: str, serve: Callable[..., Serving]) -> None:
    model = Branches()
    xs = [torch.ones(2, 8, requires_grad=True), (-torch.ones(2, 8)).requires_grad_()]
    expected = [model(x) for x in xs]
    engine = serve(model)
    call = compiled(model, inner)
    for x, out in zip(xs, expected, strict=True):
        found = call(x)
        torch.testing.assert_close(found, out)
        found.sum().backward()
    torch.testing.assert_close(xs[0].grad, model.left.new_ones(2, 8) @ engine.home[0])
    assert not engine.kept
    assert not engine.present


class Nested(nn.Module):
    """A region that is compiled one time and called twice, with views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.outside = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.region(self.region(x, self.first.t()), self.second.t()) @ self.outside
        return found


@EACH_INNER
def test_weights_of_nested_regions_are_kept(inner: str, serve: Callable[..., Serving]) -> None:
    model = Nested()
    x = torch.randn(2, 8, requires_grad=True)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    engine = serve(model)
    out = compiled(model, inner)(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], gradient)
    assert engine.kept == dict.fromkeys([0, 1], "a nested compiled region reads it")
    assert not engine.present


@torch.library.custom_op("zenflow_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    """Has an effect that must stay in order: AOTAutograd gives its graphs a token for it, in front of all inputs."""
    return x.clone()


@noted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noted.register_effect(torch.library.EffectType.ORDERED)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.read = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.written.clamp_(-0.5, 0.5)
        found: Tensor = noted(x @ self.written) @ self.read
        return found


@EACH_INNER
@torch.no_grad()
def test_tokens_of_effects_are_no_inputs(inner: str, serve: Callable[..., Serving]) -> None:
    model, x = Noting(), torch.randn(2, 8)
    reference = copy.deepcopy(model)
    engine = serve(model)
    torch.testing.assert_close(compiled(model, inner)(x), reference(x))
    assert engine.kept == {0: "the forward writes it"}


# What the backward recomputes.


class Scaled(nn.Module):
    """Matrices that are computed from weights, a vector that stays on the device, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.masked = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))
        self.gain = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(64, 64).tril()
        return torch.tanh(torch.tanh(x @ (self.scaled * (self.gain * 2))) @ (self.masked * mask))


class Checkpointed(nn.Module):
    """Regions that are recomputed, with products of weights at their borders."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) for _ in range(3))
        self.gain = nn.Parameter(torch.randn(64))

    def region(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ (weight * self.gain))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = checkpoint(self.region, x, weight, use_reentrant=False)
        return x


@EACH_INNER
@pytest.mark.parametrize("build", [Scaled, Checkpointed])
@pytest.mark.parametrize("casts", [False, True])
def test_no_product_of_a_weight_is_saved(
    inner: str, build: Callable[[], nn.Module], casts: bool, serve: Callable[..., Serving]
) -> None:
    model = build()
    engine = serve(model, poisons=False)
    engine.access.keep_weights({p: "small" for p, param in enumerate(engine.params) if param.dim() == 1})
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        out = compiled(model, inner)(torch.randn(2, 64, requires_grad=True))
    assert saved_bytes(out) < 64 * 64 * 2, "less than one matrix in bf16"
    out.float().sum().backward()
    assert {engine.loads[p] for p in engine.home} == {2}


@torch.library.custom_op("zenflow_tests::rounded", mutates_args=())
def rounded(weight: Tensor) -> Tensor:
    """Rounds at random, without telling PyTorch."""
    return (weight + torch.rand_like(weight)).floor()


@rounded.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


rounded.register_autograd(lambda ctx, grad: grad)


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x @ rounded(self.weight)
        return found


@EACH_INNER
def test_operators_of_users_run_one_time(inner: str, serve: Callable[..., Serving]) -> None:
    model = Rounding()
    serve(model)
    x = torch.eye(8, requires_grad=True)
    out = compiled(model, inner)(x)
    assert torch.equal(torch.autograd.grad(out, x, torch.eye(8))[0], out.detach().t())


def test_inductor_caches_graphs_that_load_weights(serve: Callable[..., Serving]) -> None:
    model = nn.Linear(8, 8)
    serve(model)
    counters.clear()
    compiled(model, "inductor")(torch.randn(2, 8)).sum().backward()
    assert not counters["inductor"]["fxgraph_cache_bypass"]
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["inductor"]["fxgraph_cache_miss"] == 2


def test_joint_passes_of_users_run_too(serve: Callable[..., Serving]) -> None:
    seen: list[bool] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    serve(model, poisons=False)
    options = {"joint_custom_post_pass": lambda graph: seen.append(True)}
    call = torch.compile(model, backend="zenflow", options=options)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(torch.randn(2, 64))
    assert seen
    assert saved_bytes(out) < 64 * 64 * 2
