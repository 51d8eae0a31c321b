"""An engine that only records what the graph nodes pass to it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from zenflow_compile.planning.plan import ParamPlan, Placement, Plan
from zenflow_compile.planning.planners import divide
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.shard_hooks import Removable

_ids = itertools.count(1000)


class RecordingEngine:
    """Implements ``ops.EngineOps`` and what the backend calls of an engine; all 2-D parameters are column-split.

    Attributes:
        executed: how often each node ran, by ``(op name, p)``; p is None for ``begin_backward``.
        trace: the same in order.
        received: the sum of each parameter's gradients.
        fetches: the parameters of each ``fetch_parameters_``.
        offloads: the parameters of each ``offload_gradients`` or ``reduce_gradients``.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        ratio: float = 0.5,
        finalizes_in_backward: bool = False,
        weight_grad_bytes: int = 0,
        placement: Placement = Placement.SPLIT_COLUMNS,
        ranks: int = 1,
    ) -> None:
        named = [(name, param) for name, param in named if param.requires_grad]
        self.id = next(_ids)
        self.worker_cores: tuple[int, ...] = ()
        self.in_backward = finalizes_in_backward
        self.finalizes_in_backward = finalizes_in_backward
        self.weight_grad_bytes = weight_grad_bytes
        self.graphs: list[Any] = []
        self.orders: list[list[int]] = []
        self.synchronized = 0
        self.executed: Counter[tuple[str, int | None]] = Counter()
        self.trace: list[tuple[str, int | None]] = []
        self.received: dict[int, Tensor] = {}
        self.fetches: list[list[int]] = []
        self.offloads: list[list[int]] = []
        self.params = [param for _, param in named]
        self._index = {id(param): p for p, param in enumerate(self.params)}
        plan = Plan(
            policy="recording",
            params=tuple(plan_of(p, name, param, ratio, placement) for p, (name, param) in enumerate(named)),
            ranks=ranks,
        )
        self.plan = divide(plan)
        for param in self.params:
            param._zenflow_owner = object()
        ops.register_engine(self)

    outdated = False

    @property
    def core(self) -> RecordingEngine:
        """This engine is its own stages, too."""
        return self

    intake = steps = access = registry = core

    @property
    def optimizer(self) -> RecordingEngine:
        return self

    def close(self) -> None:
        ops.unregister_engine(self.id)
        for param in self.params:
            del param._zenflow_owner

    def index_of(self, param: Tensor) -> int | None:
        return self._index.get(id(param))

    def declare_forward_order(self, order: list[int]) -> None:
        self.orders.append(order)

    def synchronize(self) -> None:
        self.synchronized += 1

    def apply_due(self, params: Iterable[Tensor] | None = None) -> None: ...

    def remember_models(self, models: Sequence[nn.Module]) -> None: ...

    def check_models(self, models: Sequence[nn.Module]) -> None: ...

    def check_unchanged(self) -> None: ...

    def keep_hooks(self, hooks: Iterable[Removable]) -> None: ...

    def offloaded(self) -> list[int]:
        return [param.index for param in self.plan.params if param.offloaded]

    def runs(self, op: str) -> dict[int | None, int]:
        """Executions of one op by parameter."""
        return {p: count for (name, p), count in self.executed.items() if name == op}

    def gradient(self, param: Tensor) -> Tensor | None:
        p = self.index_of(param)
        return None if p is None else self.received.get(p)

    def _note(self, op: str, p: int | None = None) -> None:
        self.executed[op, p] += 1
        self.trace.append((op, p))

    def begin_backward(self) -> None:
        self._note("begin_backward")

    def offload_gradients(self, ps: Sequence[int], grads: Sequence[Tensor]) -> None:
        self.offloads.append(list(ps))
        for p, grad in zip(ps, grads, strict=True):
            assert grad.shape == self.params[p].shape, "the gradient of one parameter was offloaded as another's"
            self._note("offload_gradients", p)
            self.received[p] = self.received[p] + grad if p in self.received else grad.clone()

    def returned_gradients(self, ps: Sequence[int]) -> dict[int, Tensor]:
        return {}

    def update_parameters(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        with_columns = [p for p in ps if self.plan.params[p].k]
        for p, param in zip(with_columns, params, strict=True):
            assert param.data_ptr() == self.params[p].data_ptr(), "one parameter would be updated in another's place"
        for p in ps:
            self._note("update_parameters", p)

    def fetch_parameters_(self, ps: Sequence[int], params: Sequence[Tensor]) -> None:
        self.fetches.append(list(ps))
        for p, param in zip(ps, params, strict=True):
            assert param.data_ptr() == self.params[p].data_ptr(), "the graph of one parameter ran with another"
            self._note("fetch_parameters_", p)

    offloaded_weights = None
    weights = SimpleNamespace(weights={}, kept={}, ring_bytes=0, declare=lambda graph, loads: None)

    def keep_weights(self, reasons: Mapping[int, str]) -> None: ...

    def begin_weights(self, graph: int) -> None: ...

    def hold_weights(self, params: Iterable[Tensor] | None = None) -> None: ...

    def load_weight_(self, p: int, inputs: Sequence[Tensor]) -> None:
        self._note("load_weight_", p)

    def unload_weight_(self, p: int) -> None:
        self._note("unload_weight_", p)

    def inference(self) -> AbstractContextManager[None]:
        return nullcontext()


def plan_of(p: int, name: str, param: Tensor, ratio: float, placement: Placement) -> ParamPlan:
    """Columns of every parameter with two or more dimensions; the others stay on the device."""
    if param.dim() < 2:
        shape = tuple(param.shape)
        return ParamPlan(index=p, name=name, shape=shape, dtype=param.dtype, placement=Placement.DEVICE)
    length, slices = param.shape[0], param[0].numel()
    k = 0 if placement is Placement.HOST else max(1, int(ratio * slices))
    return ParamPlan(
        index=p, name=name, shape=tuple(param.shape), dtype=param.dtype, placement=placement, dim=1, slices=slices,
        length=length, k=k, interval=4, phase=p % 4,
    )  # fmt: skip
