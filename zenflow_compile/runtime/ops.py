"""The graph nodes of zenflow: schemas, fake kernels, names for the profiler, and the registry of live engines.

The passes know nothing else of the runtime. The last arguments of an op are the engine's id and the parameter's index
in its plan. Both are small stable integers, so that compiled graphs stay cacheable. Nothing that changes from step to
step is an argument: the op runs every step and the engine decides what it does.

[Note: tokens] Inductor (2.11 to 2.13) orders effectful ops only if they were traced through AOTAutograd; ops that a
pass inserts afterwards would be free to move. ``begin_backward`` therefore returns a dependency token that the
following ops mutate: a plain data dependency, which keeps FX order and prevents dead-code elimination.

[Note: staged gradients] Selected and deferred gradients live in engine-owned memory and are never op outputs: Inductor
reuses the buffer of an op's output inside the graph while Python still holds a reference to it.

[Note: one op for several parameters] An op call costs microseconds, and a model has hundreds of parameters. So one op
serves all gradients, updates or fetches that a pass finds close to each other, and each of them does several things in
one read of its arguments; ``explain`` shows these parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.profiler import record_function

from zenflow_compile.planning.plan import Plan
from zenflow_compile.torch_internals.torch_private import profiler_active

P = ParamSpec("P")
R = TypeVar("R")

MOST_NAMES = 8
"""An event of ``torch.profiler`` for more parameters names only the first ones."""


class IntakeOps(Protocol):
    def begin_backward(self) -> None: ...
    def offload_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None: ...
    def returned_gradients(self, ps: Sequence[int]) -> dict[int, Tensor]: ...


class StepOps(Protocol):
    def update_parameters(self, ps: Sequence[int], params: Sequence[Tensor]) -> None: ...


class AccessOps(Protocol):
    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None: ...
    def begin_weights(self, graph: int) -> None: ...
    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None: ...
    def unload_weight_(self, p: int) -> None: ...


class EngineOps(Protocol):
    """What the ops call; implemented by the runtime's engine and by the recording engine of the tests."""

    id: int

    @property
    def intake(self) -> IntakeOps: ...
    @property
    def steps(self) -> StepOps: ...
    @property
    def access(self) -> AccessOps: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def worker_cores(self) -> tuple[int, ...]: ...
    def index_of(self, param: Tensor) -> int | None: ...
    def inference(self) -> AbstractContextManager[None]: ...


class ClaimOps(Protocol):
    """Parameters of an optimizer that has not ended. Its engine may not have been built."""

    @property
    def engine(self) -> EngineOps: ...
    def holds(self, param: Tensor) -> bool: ...


_LIVE: WeakValueDictionary[int, EngineOps] = WeakValueDictionary()
_CLAIMS: WeakSet[ClaimOps] = WeakSet()


def register_engine(engine: EngineOps) -> None:
    _LIVE[engine.id] = engine


def unregister_engine(engine_id: int) -> None:
    """Forget a closed engine, so that no parameter counts as owned by it."""
    _LIVE.pop(engine_id, None)


def live_engines() -> Iterator[EngineOps]:
    return iter(tuple(_LIVE.values()))


def register_claim(claim: ClaimOps) -> None:
    _CLAIMS.add(claim)


def unregister_claim(claim: ClaimOps) -> None:
    _CLAIMS.discard(claim)


def find_engine(engine_id: int) -> EngineOps | None:
    return _LIVE.get(engine_id)


def owner_of(param: Tensor) -> tuple[EngineOps, int] | None:
    """The engine that updates ``param`` and the parameter's index in its plan; None if no optimizer owns it.

    This is a use of the optimizer: it builds an engine that has not been built.
    """
    for engine in live_engines():
        if (index := engine.index_of(param)) is not None:
            return engine, index
    for claim in tuple(_CLAIMS):
        if claim.holds(param):
            index = claim.engine.index_of(param)
            return None if index is None else (claim.engine, index)
    return None


def is_owned(param: Tensor) -> bool:
    """Whether an optimizer owns ``param``. Builds nothing."""
    live = any(engine.index_of(param) is not None for engine in live_engines())
    return live or any(claim.holds(param) for claim in tuple(_CLAIMS))


def claims_of(params: Sequence[Tensor]) -> list[ClaimOps]:
    """The claims on any of ``params``, in the order of ``params``, which all ranks share. Builds nothing."""
    claims = tuple(_CLAIMS)
    found = {id(claim): claim for param in params for claim in claims if claim.holds(param)}
    return list(found.values())


def any_owner() -> bool:
    """Whether there is an open optimizer. Builds nothing."""
    return bool(_LIVE) or bool(_CLAIMS)


def engine(engine_id: int) -> EngineOps:
    if (found := _LIVE.get(engine_id)) is None:
        raise RuntimeError(
            f"the optimizer behind this compiled graph (engine {engine_id}) is closed; "
            "compile the model again with torch.compile(model, backend='zenflow') after creating a new optimizer"
        )
    return found


def returning_gradients(code: Callable[..., Any], engine_id: int, places: Mapping[int, int]) -> Callable[..., Any]:
    """Wrap a compiled backward so that it returns the gradients that the engine did not take.

    The graph returns None for each offloaded gradient. Hooks on the parameter, a user's tensor in ``.grad`` and
    ``torch.autograd.grad`` need the gradient itself, in some backwards and not in others, so the wrapper and not the
    graph replaces the None: hooks may come and go without a recompile.

    Args:
        code: takes a list of arguments, which it may empty.
        places: positions among the outputs, by parameter.
    """
    ps = tuple(places)

    def run(args: list[Any]) -> Any:
        outputs = code(args)
        engine = _LIVE.get(engine_id)
        if engine is None or not (returned := engine.intake.returned_gradients(ps)):
            return outputs
        outputs = list(outputs)
        for p, grad in returned.items():
            outputs[places[p]] = grad
        return tuple(outputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def marking_inference(code: Callable[..., Any], engine_id: int) -> Callable[..., Any]:
    """A compiled forward without gradients that tells the engine when it runs: it belongs to no training step."""

    def run(args: list[Any]) -> Any:
        if (engine := _LIVE.get(engine_id)) is None:
            return code(args)
        with engine.inference():
            return code(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def event_name(phase: str, names: Sequence[str]) -> str:
    """``zenflow::phase (first, second, +7)``."""
    shown = [*names[:MOST_NAMES], *([f"+{len(names) - MOST_NAMES}"] if len(names) > MOST_NAMES else [])]
    return f"zenflow::{phase} ({', '.join(shown)})" if shown else f"zenflow::{phase}"


def annotated(phase: str, names_of: Callable[..., Sequence[str]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show calls as ``zenflow::phase (names)`` in the profile, if ``torch.profiler`` or ``emit_nvtx`` is active.

    Without a profiler this adds one call and one look at a flag, and ``names_of`` is not called. Native workers never
    show.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **keywords: P.kwargs) -> R:
            if not profiler_active():
                return function(*args, **keywords)
            with record_function(event_name(phase, names_of(*args, **keywords))):
                return function(*args, **keywords)

        return run

    return decorate


_library = torch.library.Library("zenflow", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order)


def _names(*args: Any) -> list[str]:
    """Names of the parameters that a node is for, by the node's arguments; none for ``begin_backward``."""
    if len(args) < 2 or (found := _LIVE.get(args[-2])) is None:
        return []
    ps = args[-1]
    return [found.plan.params[p].name for p in ([ps] if isinstance(ps, int) else ps)]


def _begin_backward(engine_id: int) -> Tensor:
    engine(engine_id).intake.begin_backward()
    # On the host whatever the default device is: it orders nodes, and no kernel reads it.
    return torch.zeros(1, device="cpu")


def _take_gradients(grads: Sequence[Tensor], token: Tensor, engine_id: int, ps: Sequence[int]) -> None:
    engine(engine_id).intake.offload_gradients(ps, grads)


_offload_gradients, _reduce_gradients = (annotated(phase, _names)(_take_gradients) for phase in ("offload", "reduce"))


@annotated("update", _names)
def _update_parameters(params: Sequence[Tensor], token: Tensor, engine_id: int, ps: Sequence[int]) -> None:
    engine(engine_id).steps.update_parameters(ps, params)


@annotated("fetch", _names)
def _fetch_parameters_(params: Sequence[Tensor], engine_id: int, ps: Sequence[int]) -> None:
    # A closed engine has applied all updates: the weights are final, and inference graphs may still read them.
    if (found := _LIVE.get(engine_id)) is not None:
        found.access.fetch_parameters_(ps, params)


def _begin_weights(engine_id: int, graph: int) -> Tensor:
    if (found := _LIVE.get(engine_id)) is not None:  # see _fetch_parameters_
        found.access.begin_weights(graph)
    return torch.zeros(1, device="cpu")  # as in ``begin_backward``


@annotated("load", _names)
def _load_weight_(inputs: Sequence[Tensor], token: Tensor, engine_id: int, p: int) -> None:
    # A closed engine has loaded all weights: see _fetch_parameters_.
    if (found := _LIVE.get(engine_id)) is not None:
        found.access.load_weight_(p, inputs)


@annotated("unload", _names)
def _unload_weight_(inputs: Sequence[Tensor], token: Tensor, engine_id: int, p: int) -> None:
    if (found := _LIVE.get(engine_id)) is not None:
        found.access.unload_weight_(p)


# The device of an op's first tensor is the op's for Inductor: gradients and parameters come before the token, which is
# on the host. Otherwise generated code would leave and enter the device around each call.
_NODES = (
    ("begin_backward(int engine) -> Tensor", _begin_backward, lambda engine_id: torch.empty(1, device="cpu")),
    # [Note: order of loads] Only the token orders the load of one weight behind the unload of another one.
    # Without it the byte budget would hold by luck.
    ("begin_weights(int engine, int graph) -> Tensor", _begin_weights, lambda *_: torch.empty(1, device="cpu")),
    # ``inputs`` are all inputs of the graph that have the weight's memory, so that readers of each stay in place.
    ("load_weight_(Tensor(a!)[] inputs, Tensor(b!) token, int engine, int p) -> ()", _load_weight_, None),
    ("unload_weight_(Tensor(a!)[] inputs, Tensor(b!) token, int engine, int p) -> ()", _unload_weight_, None),
    # Parameters without columns on the device (k = 0) are in ``ps`` of ``update_parameters`` only.
    ("offload_gradients(Tensor[] grads, Tensor(a!) token, int engine, int[] ps) -> ()", _offload_gradients, None),
    ("reduce_gradients(Tensor[] grads, Tensor(a!) token, int engine, int[] ps) -> ()", _reduce_gradients, None),
    ("update_parameters(Tensor(a!)[] params, Tensor(b!) token, int engine, int[] ps) -> ()", _update_parameters, None),
    ("fetch_parameters_(Tensor(a!)[] params, int engine, int[] ps) -> ()", _fetch_parameters_, None),
)


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None) -> Any:
    name = schema[: schema.index("(")]
    _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"zenflow::{name}", fake or (lambda *args: None), lib=_library)
    op = getattr(torch.ops.zenflow, name).default
    torch.fx.node.has_side_effect(op)
    return op


OPS = tuple(_define(*node) for node in _NODES)
(
    BEGIN_BACKWARD, BEGIN_WEIGHTS, LOAD_WEIGHT_, UNLOAD_WEIGHT_,
    OFFLOAD_GRADIENTS, REDUCE_GRADIENTS, UPDATE_PARAMETERS, FETCH_PARAMETERS_,
) = OPS  # fmt: skip
MUTATING = tuple(op for op in OPS if op._schema.is_mutable)
"""The ops that write to an argument: a parameter, a list of parameters or the token."""
