"""What a pass is and what it may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch.fx import GraphModule

from zenflow_compile.planning.offloaded_weights import OffloadedWeights
from zenflow_compile.planning.plan import ParamPlan, Plan


class Phase(StrEnum):
    """Which graph of a training step is rewritten."""

    FORWARD = "forward"
    INFERENCE = "inference"
    BACKWARD = "backward"
    STEP = "step"  # not captured: what ``step()`` does, written as a graph for ``explain``


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Everything that a pass may read besides the graph.

    Attributes:
        plan: the plan of one engine.
        engine_id: the id of that engine, which every inserted node has as an argument.
        phase: which graph this is.
        params: ``(p, input index)`` for each parameter of the engine that is an input of Dynamo's graph: ``p`` is the
            index in the plan, the input index counts the inputs of Dynamo's graph. A parameter that the graph was
            called with twice has two pairs.
        finalizes_in_backward: whether the backward graph may contain update nodes.
        forward_order: parameters by first use in the forward, as far as known.
        weight_grad_bytes: device memory that a new order of the weight gradients may keep alive; 0 keeps the order.
        weights: those that are offloaded; None: all are on the device.
        number: of this graph among those of the engine.
        weight_storages: their indices by the storage of their example values in the forward: of views that it saves.
    """

    plan: Plan
    engine_id: int
    phase: Phase
    params: tuple[tuple[int, int], ...]
    finalizes_in_backward: bool = False
    forward_order: tuple[int, ...] = ()
    weight_grad_bytes: int = 0
    weights: OffloadedWeights | None = None
    number: int = 0
    weight_storages: Mapping[int | None, int] = field(default_factory=dict)

    def in_forward_order(self) -> list[int]:
        """This graph's parameters by first use in the forward; parameters of unknown use follow in the plan's order."""
        known = {p: position for position, p in enumerate(self.forward_order)}
        return sorted({p for p, _ in self.params}, key=lambda p: (known.get(p, len(known)), p))

    def inputs_of(self, p: int) -> list[int]:
        """The input indices of one parameter, in order. There are several if the graph was called with it twice."""
        return sorted(index for each, index in self.params if each == p)

    def offloaded(self) -> Iterator[tuple[ParamPlan, int]]:
        """The offloaded parameters with their input indices; passes insert no nodes for other parameters."""
        for p, index in self.params:
            if (param := self.plan.params[p]).offloaded:
                yield param, index


GraphPass = Callable[[GraphModule, PassContext], int]
"""One rewrite: a function that edits the graph in place and returns how many places it rewrote.

A second run on the same graph rewrites nothing and returns 0. ``passes.pipeline`` has the order of the passes."""
