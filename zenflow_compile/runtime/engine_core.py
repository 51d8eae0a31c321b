"""What the stages of one engine share: its parts, its state, and the order of the parts at each moment of a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zenflow_compile.options.options import Options
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.features import FEATURES
from zenflow_compile.runtime.features.feature import OPEN_MOMENTS
from zenflow_compile.runtime.moments import Calls, Moments, present, weakly
from zenflow_compile.runtime.parameters.claim import Claim, Holders
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.backward_state import BackwardPass, StaleGradients
from zenflow_compile.runtime.step.one_rank import OneRank
from zenflow_compile.runtime.step.rank_calls import RankCalls, ShardCalls
from zenflow_compile.runtime.step.run_ahead import RunAhead
from zenflow_compile.runtime.step.schedule import Schedule
from zenflow_compile.runtime.step.upload_scheduler import UploadScheduler
from zenflow_compile.torch_internals import torch_private

_ids = itertools.count()
_dividing: weakref.WeakSet[EngineCore] = weakref.WeakSet()
"""The cores of live engines whose parameters are divided among ranks."""


class EngineCore:
    """Owns the registry of an optimizer's parameters, with their memory, lanes and workers, and what steps share.

    An engine refers to its stages, and they to their core, which refers to neither: without a cycle, the end of the
    last reference to an optimizer ends its engine.

    Attributes:
        id: by which graph nodes name the engine.
        params: all parameters, in the plan's order.
        offloaded, streamed: those that the host updates, and those whose state the device streams, by index.
        weights: ``HostWeights``, of the parameters whose weights are in host memory between their uses.
        calls: what all ranks do together; of those that divide the parameters it is ``ranks``, too.
        graphs: what the backend rewrote for this engine, for ``explain``.
        features: those of ``FEATURES`` that this engine has.
        moments: what the parts do at each moment of a step.
        sharded: the parameters are those of a model that FSDP2 shards, over one rank or several.
        claim: the optimizer's, which the engine serves; None while it is built, and when another engine replaces it.
        on_backward_end: called with the optimizer after each backward.
        step: number of optimizer steps so far.
        updating: an optimizer step runs, and all gradients are final.
        failure: the error that interrupted a step half-way; every further step raises it until a state is loaded.
        used: a graph, a gradient or an optimizer step depends on this engine.
        closing: ``close()`` has begun; after an interrupt in it only another ``close()`` may follow.
        closed: it has ended.
    """

    def __init__(
        self,
        engine: weakref.ref[Any],
        groups: list[dict[str, Any]],
        options: Options,
        rules: Sequence[Rule],
        device: torch.device,
        *,
        in_backward: bool,
        ranks: RankGroup | None,
        sharded: bool,
    ) -> None:
        self.id = next(_ids)
        self.moments: Moments
        self.options = options
        self.in_backward = in_backward
        self.device = device
        self.sharded = sharded
        served = device_of(device)
        self.recorder = Recorder(served.streams, served)
        self.registry = ParamRegistry(
            groups,
            options,
            rules,
            device,
            self.recorder,
            engine,
            visible_gradients=not in_backward,
            ranks=None if sharded else ranks,
        )
        self.order = self.registry.transport.order
        self.params = self.registry.params
        self.offloaded = self.registry.offloaded
        self.streamed = self.registry.streamed
        self.weights = self.registry.weights
        self.device_memory = self.registry.transport.device_memory
        self.uploads = UploadScheduler(self.registry, self.recorder)
        self.ranks: RankCalls | None = None
        self.calls = OneRank()
        if ranks is not None and sharded:
            self.calls = ShardCalls(ranks, self.registry, self.recorder)
        elif ranks is not None:
            self.calls = self.ranks = RankCalls(ranks, self.registry, device, options, self.recorder)
        self.stale = StaleGradients(self.registry)
        self.holders = Holders(self.registry.given)
        self.schedule = Schedule(options, device, self.recorder, ranks)
        self.run_ahead = None if served.streams is None else RunAhead(served, served.streams, self.recorder)
        self.backward = BackwardPass()
        self.graphs: list[Any] = []
        self.claim: Claim | None = None
        self.on_backward_end: Callable[[Any], None] | None = None
        self.step = 0
        self.updating = False
        self.failure: BaseException | None = None
        self.used = self.closing = self.closed = False
        self.features = [feature for kind in FEATURES if (feature := kind.of(self)) is not None]

    @property
    def optimizer(self) -> Any:
        """The optimizer that this engine serves; None while the engine is built, or when it was collected."""
        return None if self.claim is None else self.claim.optimizer

    @property
    def finalizes_in_backward(self) -> bool:
        """Return whether updates may run inside of a backward.

        Not with clipping, whose norm needs all gradients, nor where ranks divide updates and may lack contributions.
        """
        return self.in_backward and self.options.max_grad_norm is None and not self.calls.divides

    def use_memory(self) -> None:
        """Have the device's memory there, which ``offload_all`` may have given back."""
        if self.device_memory.given_back:
            self.bring_back()

    def bring_back(self) -> None:
        """Bring back what ``offload_all`` has moved, before work that needs it is queued: a moment's call."""
        self.follow()
        with self.calls.announcing():
            self.device_memory.bring_back()
        self.arrange()

    def check(self) -> None:
        """Raise if the engine must not be used: closed, or failed. Its work follows that of the last call."""
        if self.closed or self.closing:
            raise RuntimeError("this optimizer is closed; create a new one, and compile the model again")
        if self.failure is not None:
            errors.refuse_failed(self.failure)
        for follow in self.moments.enter:
            follow()

    def check_backward(self) -> None:
        """Raise if the last backward of the optimizer-in-backward form failed half-way; not inside of a backward."""
        if self.in_backward and self.backward.task is not None and torch_private.current_graph_task() == -1:
            self.refuse_half_made_step()

    def refuse_half_made_step(self) -> None:
        """Raise if parameters were updated in a backward that has failed, and others were not."""
        if updated := self.stale.updated():
            self.failure = RuntimeError(
                "a backward failed or was interrupted after some parameters had been updated in it, "
                f"{len(updated)} of {len(self.params)} ({updated[0]}, ...)"
            )
            errors.refuse_failed(self.failure)

    @property
    def splits_now(self) -> bool:
        """Return whether this backward is the last one of a step, so that its gradients are split and copied."""
        declared = self.options.gradient_accumulation_steps
        return declared is None or self.backward.count == declared - 1

    def arrange(self) -> None:
        """Make the moments of a step from the parts that the engine has now. The reason for a place is beside it."""
        with self.backward.lock:  # threads may add and take parts
            order, ranks, run_ahead = self.order, self.ranks, self.run_ahead
            exchange, weights = self.registry.transport.exchange, self.weights
            backward, recorder = self.backward, self.recorder
            streamed = self.streamed if self.streamed.params else None
            profiled = recorder.timeline is not None

            def phase(name: str) -> object:
                return profiled and partial(recorder.begin_phase, name)

            of_features = [feature.calls() for feature in self.features]
            if unknown := {moment for calls in of_features for moment in calls} - OPEN_MOMENTS:
                raise ValueError(f"features are called at {sorted(OPEN_MOMENTS)}, and not at {sorted(unknown)}")

            def features(moment: str) -> Calls:
                assert moment in OPEN_MOMENTS
                return present(*(calls.get(moment) for calls in of_features))

            enter = present(order and order.follow)
            use_memory = present(self.device_memory.given_back and weakly(self.bring_back))
            begin_updates = present(self.registry.check_groups, run_ahead and run_ahead.begin_step)
            self.moments = Moments(
                allocated=present(ranks and ranks.reduction.parameters_changed, *features("allocated")),
                enter=enter,
                enter_ahead=present(order and order.follow_step),
                use_memory=use_memory,
                enter_step=present(*use_memory, ranks and weakly(self.refuse_unaveraged)),
                discard=present(ranks and weakly(self.find_unaveraged)),
                enter_backward=present(
                    *enter,  # first: the others queue work
                    *use_memory,  # before all that reads the device's state
                    self.registry.check_unchanged,
                    backward.enter_thread,  # before the refusals of several threads
                    ranks and backward.refuse_concurrent,  # ranks send gradients in one order
                    ranks and ranks.begin_backward,
                    ranks and weakly(self.average_unfrozen),
                ),
                begin_backward=present(
                    *features("begin_backward"),  # first: the others' work is not the forward's
                    phase("backward"),
                    # After the forward, whose weights come through the same lane.
                    exchange.overlaps and exchange.start_uploads,
                    streamed and streamed.prefetch,
                ),
                gradients=present(*enter, streamed and streamed.prefetch),
                contributed=present(ranks and partial(_receive_in_order, backward)),
                end_backward=present(profiled and recorder.end_phase),
                forward=present(phase("forward")),
                begin_updates=begin_updates,
                begin_step=present(
                    *enter,
                    *begin_updates,  # first of all that may raise: nothing has been changed then
                    weights.weights and weights.begin_step,
                    streamed and streamed.raise_failures,
                    streamed and streamed.check_weights,
                    phase("update"),
                ),
                final=features("final"),
                settle=present(exchange.overlaps and exchange.finish),
                end_step=present(
                    run_ahead and run_ahead.end_step,
                    *features("end_step"),  # before the profiler's own work
                    profiled and recorder.end_step,
                    self.sharded and order and order.end_step,  # last: it notes what the step has queued
                ),
                abandon=features("abandon"),
                close=features("close"),
            )

    def find_unaveraged(self) -> list[int]:
        """Hook parameters that were unfrozen, and return those that have a gradient, which ranks do not average yet."""
        unfrozen = [] if self.claim is None else self.claim.listen()
        return [p for p in unfrozen if self.params[p].grad is not None]

    def average_unfrozen(self) -> None:
        """Have ranks average the gradients of unfrozen parameters in the backward that begins."""
        for p in self.find_unaveraged():
            self.calls.note_on_device(p)

    def refuse_unaveraged(self) -> None:
        """Refuse a step on gradients that ranks have not averaged: the loop may have clipped them.

        Raises:
            RuntimeError: only parameters that were unfrozen have had gradients, so that the backward was not noticed.
        """
        if unaveraged := self.find_unaveraged():
            raise RuntimeError(
                f"{self.registry.plan.params[unaveraged[0]].name} was unfrozen, and the backward brought gradients of "
                "such parameters alone, which ranks have not averaged: call optimizer.zero_grad() after "
                "requires_grad=True is set, and run the backward again"
            )

    def register(self) -> None:
        """Let the ends of backwards, which ranks make in one order, find this core, which is complete."""
        if self.ranks is not None:
            _dividing.add(self)

    def unregister(self) -> None:
        """Undo ``register``."""
        _dividing.discard(self)

    def follow(self) -> None:
        """Order the work that is queued next after what the engine's memory is used for."""
        for follow in self.moments.enter:
            follow()


def _receive_in_order(ended: BackwardPass) -> None:
    """Receive the gradients of the backward that has ``ended``, those of all engines in an order that all ranks have.

    Ranks may call the engines in other orders: each engine learns of the end by its first gradient.
    """
    found: dict[int, EngineCore] = {}
    for core in tuple(_dividing):
        if core.ranks is not None and core.backward.task == ended.task:
            found[core.ranks.group.number] = core
    for _, core in sorted(found.items()):
        backward, ranks = core.backward, core.ranks
        if ranks is not None and backward.contributed and not backward.received and core.splits_now:
            backward.received = True
            ranks.end_backward()
