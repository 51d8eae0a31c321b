"""The graph nodes of zenflow: schemas, fake kernels and the registry of live engines.

The passes know nothing else of the runtime. The last arguments of an op are the engine's id and the parameter's index
in its plan. Both are small stable integers, so that compiled graphs stay cacheable. Nothing that changes from step to
step is an argument: the op runs every step and the engine decides what it does.

[Note: tokens] Inductor (2.11 to 2.13) orders effectful ops only if they were traced through AOTAutograd; ops that a
pass inserts afterwards would be free to move. ``begin_backward`` therefore returns a dependency token that the
following ops mutate: a plain data dependency, which keeps FX order and prevents dead-code elimination.

[Note: staged gradients] Selected and deferred gradients live in engine-owned memory and are never op outputs: Inductor
reuses the buffer of an op's output inside the graph while Python still holds a reference to it.

[Note: two forms] Passes insert one unfused op for each action; ``explain`` shows these. The last pass
replaces groups of them by fused ops, which run: an op call costs microseconds, and a model has hundreds of parameters.
The unfused ops run too, with bitwise equal results: in graphs where a user's own pass reads a value between them, and
in the tests that compare both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from zenflow_compile.planning.plan import Plan
from zenflow_compile.runtime.trace_annotations import annotated


class EngineOps(Protocol):
    """What the ops call; implemented by the runtime's engine and by the recording engine of the tests."""

    id: int

    @property
    def plan(self) -> Plan: ...
    @property
    def worker_cores(self) -> tuple[int, ...]: ...
    def index_of(self, param: Tensor) -> int | None: ...
    def begin_backward(self) -> None: ...
    def column_norms(self, p: int, grad: Tensor) -> Tensor: ...
    def select_columns(self, p: int, norms: Tensor) -> Tensor: ...
    def split_columns(self, p: int, grad: Tensor, selected: Tensor) -> None: ...
    def copy_to_host(self, p: int) -> None: ...
    def adam_columns_(self, p: int, param: Tensor) -> None: ...
    def update_on_host(self, p: int) -> None: ...
    def copy_to_device_(self, p: int, param: Tensor) -> None: ...
    def offload_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None: ...
    def reduce_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None: ...
    def returned_gradients(self, ps: Sequence[int]) -> dict[int, Tensor]: ...
    def update_parameters(self, ps: Sequence[int], params: Sequence[Tensor]) -> None: ...
    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None: ...
    def begin_weights(self, graph: int) -> None: ...
    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None: ...
    def unload_weight_(self, p: int) -> None: ...
    def inference(self) -> AbstractContextManager[None]: ...


class ClaimOps(Protocol):
    """Parameters of an optimizer that has not ended. Its engine may not have been built."""

    @property
    def engine(self) -> EngineOps: ...
    def holds(self, param: Tensor) -> bool: ...


_LIVE: WeakValueDictionary[int, EngineOps] = WeakValueDictionary()
_CLAIMS: WeakSet[ClaimOps] = WeakSet()


def register_engine(engine: EngineOps) -> None:
    """Make ``engine`` reachable for graph nodes until it is collected or unregistered."""
    _LIVE[engine.id] = engine


def unregister_engine(engine_id: int) -> None:
    """Forget a closed engine, so that no parameter counts as owned by it."""
    _LIVE.pop(engine_id, None)


def live_engines() -> Iterator[EngineOps]:
    """The engines that are alive now."""
    return iter(tuple(_LIVE.values()))


def register_claim(claim: ClaimOps) -> None:
    """Register an optimizer as the owner of its parameters, until it ends."""
    _CLAIMS.add(claim)


def unregister_claim(claim: ClaimOps) -> None:
    """Forget the claim of an optimizer that has ended."""
    _CLAIMS.discard(claim)


def find_engine(engine_id: int) -> EngineOps | None:
    """The engine, or None if it was closed or collected."""
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
    """Resolve an engine.

    Raises:
        RuntimeError: the engine was closed or collected.
    """
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
    graph replaces the None.

    Args:
        code: takes a list of arguments, which it may empty.
        engine_id: the engine that takes the gradients.
        places: positions among the outputs, by parameter.
    """
    ps = tuple(places)

    def run(args: list[Any]) -> Any:
        outputs = code(args)
        engine = _LIVE.get(engine_id)
        if engine is None or not (returned := engine.returned_gradients(ps)):
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


_library = torch.library.Library("zenflow", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order)


def _names(*args: Any) -> list[str]:
    """Names of the parameters that a node is for, by the node's arguments; none for ``begin_backward``."""
    if len(args) < 2 or (found := _LIVE.get(args[-2])) is None:
        return []
    ps = args[-1]
    return [found.plan.params[p].name for p in ([ps] if isinstance(ps, int) else ps)]


def _begin_backward(engine_id: int) -> Tensor:
    engine(engine_id).begin_backward()
    # On the host whatever the default device is: it orders nodes, and no kernel reads it.
    return torch.zeros(1, device="cpu")


@annotated("column_norms", _names)
def _column_norms(grad: Tensor, engine_id: int, p: int) -> Tensor:
    return engine(engine_id).column_norms(p, grad)


@annotated("select", _names)
def _select_columns(norms: Tensor, engine_id: int, p: int) -> Tensor:
    return engine(engine_id).select_columns(p, norms)


@annotated("split", _names)
def _split_columns(grad: Tensor, token: Tensor, selected: Tensor, engine_id: int, p: int) -> None:
    engine(engine_id).split_columns(p, grad, selected)


@annotated("offload", _names)
def _copy_to_host(token: Tensor, engine_id: int, p: int) -> None:
    engine(engine_id).copy_to_host(p)


@annotated("reduce", _names)
def _reduce_gradient(grad: Tensor, token: Tensor, engine_id: int, p: int) -> None:
    engine(engine_id).reduce_gradients([p], [grad])


@annotated("update", _names)
def _adam_columns_(param: Tensor, token: Tensor, engine_id: int, p: int) -> None:
    engine(engine_id).adam_columns_(p, param)


@annotated("update_on_host", _names)
def _update_on_host(token: Tensor, engine_id: int, p: int) -> None:
    engine(engine_id).update_on_host(p)


@annotated("fetch", _names)
def _copy_to_device_(param: Tensor, engine_id: int, p: int) -> None:
    # A closed engine has applied all updates: the weights are final, and inference graphs may still read them.
    if (found := _LIVE.get(engine_id)) is not None:
        found.copy_to_device_(p, param)


@annotated("offload", _names)
def _offload_gradients(grads: Sequence[Tensor], token: Tensor, engine_id: int, ps: Sequence[int]) -> None:
    engine(engine_id).offload_gradients(ps, grads)


@annotated("reduce", _names)
def _reduce_gradients(grads: Sequence[Tensor], token: Tensor, engine_id: int, ps: Sequence[int]) -> None:
    engine(engine_id).reduce_gradients(ps, grads)


@annotated("update", _names)
def _update_parameters(params: Sequence[Tensor], token: Tensor, engine_id: int, ps: Sequence[int]) -> None:
    engine(engine_id).update_parameters(ps, params)


@annotated("fetch", _names)
def _fetch_parameters_(params: Sequence[Tensor], engine_id: int, ps: Sequence[int]) -> None:
    if (found := _LIVE.get(engine_id)) is not None:  # see _copy_to_device_
        found.fetch_parameters_(ps, params)


def _begin_weights(engine_id: int, graph: int) -> Tensor:
    if (found := _LIVE.get(engine_id)) is not None:  # see _copy_to_device_
        found.begin_weights(graph)
    return torch.zeros(1, device="cpu")  # as in ``begin_backward``


@annotated("load", _names)
def _load_weight_(inputs: Sequence[Tensor], token: Tensor, engine_id: int, p: int) -> None:
    # A closed engine has loaded all weights: see _copy_to_device_.
    if (found := _LIVE.get(engine_id)) is not None:
        found.load_weight_(p, inputs)


@annotated("unload", _names)
def _unload_weight_(inputs: Sequence[Tensor], token: Tensor, engine_id: int, p: int) -> None:
    if (found := _LIVE.get(engine_id)) is not None:
        found.unload_weight_(p)


def _plan_of(engine_id: int, p: int) -> tuple[int, int]:
    param = engine(engine_id).plan.params[p]
    return param.slices, param.k


def _fake_norms(grad: Tensor, engine_id: int, p: int) -> Tensor:
    slices, _ = _plan_of(engine_id, p)
    return grad.new_empty((slices,), dtype=torch.float32)


def _fake_selection(norms: Tensor, engine_id: int, p: int) -> Tensor:
    _, k = _plan_of(engine_id, p)
    return norms.new_empty((k,), dtype=torch.int32)


# The device of an op's first tensor is the op's for Inductor: gradients and parameters come before the token, which is
# on the host. Otherwise generated code would leave and enter the device around each call.
_NODES = (
    ("begin_backward(int engine) -> Tensor", _begin_backward, lambda engine_id: torch.empty(1, device="cpu")),
    ("column_norms(Tensor grad, int engine, int p) -> Tensor", _column_norms, _fake_norms),
    ("select_columns(Tensor norms, int engine, int p) -> Tensor", _select_columns, _fake_selection),
    ("split_columns(Tensor grad, Tensor(a!) token, Tensor selected, int engine, int p) -> ()", _split_columns, None),
    ("copy_to_host(Tensor(a!) token, int engine, int p) -> ()", _copy_to_host, None),
    ("reduce_gradient(Tensor grad, Tensor(a!) token, int engine, int p) -> ()", _reduce_gradient, None),
    ("adam_columns_(Tensor(a!) param, Tensor(b!) token, int engine, int p) -> ()", _adam_columns_, None),
    ("update_on_host(Tensor(a!) token, int engine, int p) -> ()", _update_on_host, None),
    ("copy_to_device_(Tensor(a!) param, int engine, int p) -> ()", _copy_to_device_, None),
    # [Note: order of loads] Only the token orders the load of one weight behind the unload of another one.
    # Without it the byte budget would hold by luck.
    ("begin_weights(int engine, int graph) -> Tensor", _begin_weights, lambda *_: torch.empty(1, device="cpu")),
    # ``inputs`` are all inputs of the graph that have the weight's memory, so that readers of each stay in place.
    ("load_weight_(Tensor(a!)[] inputs, Tensor(b!) token, int engine, int p) -> ()", _load_weight_, None),
    ("unload_weight_(Tensor(a!)[] inputs, Tensor(b!) token, int engine, int p) -> ()", _unload_weight_, None),
    # The fused ops. Parameters without columns on the device (k = 0) are in ``ps`` of ``update_parameters`` only.
    ("offload_gradients(Tensor[] grads, Tensor(a!) token, int engine, int[] ps) -> ()", _offload_gradients, None),
    ("reduce_gradients(Tensor[] grads, Tensor(a!) token, int engine, int[] ps) -> ()", _reduce_gradients, None),
    ("update_parameters(Tensor(a!)[] params, Tensor(b!) token, int engine, int[] ps) -> ()", _update_parameters, None),
    ("fetch_parameters_(Tensor(a!)[] params, int engine, int[] ps) -> ()", _fetch_parameters_, None),
)


def _define() -> None:
    for schema, kernel, fake in _NODES:
        name = schema[: schema.index("(")]
        _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
        _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"zenflow::{name}", fake or (lambda *args: None), lib=_library)


_define()

BEGIN_BACKWARD = torch.ops.zenflow.begin_backward.default
COLUMN_NORMS = torch.ops.zenflow.column_norms.default
SELECT_COLUMNS = torch.ops.zenflow.select_columns.default
SPLIT_COLUMNS = torch.ops.zenflow.split_columns.default
COPY_TO_HOST = torch.ops.zenflow.copy_to_host.default
ADAM_COLUMNS_ = torch.ops.zenflow.adam_columns_.default
UPDATE_ON_HOST = torch.ops.zenflow.update_on_host.default
COPY_TO_DEVICE_ = torch.ops.zenflow.copy_to_device_.default
BEGIN_WEIGHTS = torch.ops.zenflow.begin_weights.default
LOAD_WEIGHT_ = torch.ops.zenflow.load_weight_.default
UNLOAD_WEIGHT_ = torch.ops.zenflow.unload_weight_.default
REDUCE_GRADIENT = torch.ops.zenflow.reduce_gradient.default
REDUCE_GRADIENTS = torch.ops.zenflow.reduce_gradients.default
OFFLOAD_GRADIENTS = torch.ops.zenflow.offload_gradients.default
UPDATE_PARAMETERS = torch.ops.zenflow.update_parameters.default
FETCH_PARAMETERS_ = torch.ops.zenflow.fetch_parameters_.default

_WRITING = (
    BEGIN_BACKWARD, SPLIT_COLUMNS, COPY_TO_HOST, ADAM_COLUMNS_, UPDATE_ON_HOST, COPY_TO_DEVICE_,
    REDUCE_GRADIENT, REDUCE_GRADIENTS, OFFLOAD_GRADIENTS, UPDATE_PARAMETERS, FETCH_PARAMETERS_,
    BEGIN_WEIGHTS, LOAD_WEIGHT_, UNLOAD_WEIGHT_,
)  # fmt: skip
for _op in _WRITING:
    torch.fx.node.has_side_effect(_op)

MUTATING = tuple(op for op in _WRITING if op._schema.is_mutable)
"""The ops that write to an argument: a parameter, a list of parameters or the token."""
