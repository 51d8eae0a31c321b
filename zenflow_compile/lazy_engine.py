"""Builds the engine of an optimizer at its first use."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.measure.this_machine import measured_hardware
from zenflow_compile.native.storage_reads import can_refuse_reads
from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import empty_plan
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.host.local_ranks import local_ranks
from zenflow_compile.runtime.nvme.state_file import existing_directory
from zenflow_compile.runtime.parameters.capacity import checked_plan, specs_of, worker_cores
from zenflow_compile.runtime.parameters.claim import Claim
from zenflow_compile.runtime.parameters.weight_room import check_room
from zenflow_compile.runtime.ranks.agreement import agreed, rank_group
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import local_part, refuse_sharded, sharding_of
from zenflow_compile.timeline.events import record_new_engine


class LazyEngine:
    """Builds the engine of one optimizer at its first use, from the parameters as they are then.

    Wrappers that copy or share the optimizer's attributes (Lightning's, Fabric's) share this object, so all of them use
    the same engine.

    Args:
        optimizer: its groups are checked against a plan. Its parameters must not be claimed yet.
        given: the options as the user gave them.
        backward_ended: called with the optimizer after each backward.
        ranks: that divide the parameters; None: this process trains alone.

    Raises:
        ValueError: an option or the plan cannot work; see ``existing_directory``, ``worker_cores`` and
            ``checked_plan``.

    Attributes:
        claim: on the optimizer's parameters.
        built: the engine, even if it is closed or outdated; None before the first use.
    """

    def __init__(
        self, optimizer: Any, given: Options, backward_ended: Callable[[Any], None], ranks: RankGroup | None
    ) -> None:
        self.built: Engine | None = None
        self._ranks = ranks
        self._alone = optimizer._trains_alone
        self._closed = False
        self._given = self._options = given
        self._updating_in_backward = optimizer._steps_in_backward
        self._backward_ended = backward_ended
        self._lock = threading.RLock()  # first gradients may arrive in several threads at once
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        # Number of groups after construction and after each add_param_group(). The groups of one call are planned
        # together, before and after the engine is built, so that a resumed run gets the plan of the saved one.
        self._calls = [len(self._groups)]
        params = [param for group in self._groups for param in group["params"]]
        _check_offloaded_weights(given, alone=ranks is None)
        if given.offload_weights == "auto":
            check_room(device_of(params[0].device), given.device_memory_bytes)
        self._check_plan(params)
        if given.overlap_step and given.policy != "resident":
            can_refuse_reads()  # warns here if not
        self.claim = Claim(optimizer)

    @property
    def options(self) -> Options:
        """The options after the performance model chose those left to it; such a choice is a first use."""
        return self.engine.options if self.built is None and _chosen_by_model(self._options) else self._options

    @property
    def engine(self) -> Engine:
        """The engine; built here if there is none, or if the model changed before the first step.

        Raises:
            RuntimeError: the optimizer is closed.
            ValueError: see :class:`~zenflow_compile.optimizer.ZenFlowAdamW`; the next use tries again.
        """
        engine = self.built
        if engine is None or engine.closed or (not engine.used and engine.outdated):
            with self._lock:
                engine = self._build()
        return engine

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called, or an error has closed the engine."""
        return self._closed or (self.built is not None and self.built.closed)

    def check_open(self) -> None:
        """Refuse the use of a closed optimizer.

        Raises:
            RuntimeError: the optimizer is closed.
        """
        if self.is_closed:
            raise RuntimeError("this ZenFlowAdamW is closed; create a new one and compile the model again")

    def add_group(self, engine: Engine | None, params: Sequence[Parameter]) -> None:
        """Claim and plan the parameters of a group that was added to the optimizer.

        Args:
            engine: to add them to; None before the first use.
            params: of the last group.

        Raises:
            ValueError: as at construction. Only the optimizer's ``param_groups`` have changed then.
        """
        claimed = len(self.claim.params)
        self._calls.append(len(self._groups))
        try:
            self.claim.add(params)
            if engine is None:
                self._check_plan(self.claim.params)
            else:
                if self._ranks is not None:
                    agreed(self._ranks, self._given, engine.options, self._groups, self.claim.params)
                engine.add_params(_named(self._groups)[-1:], len(self._groups) - 1)
        except BaseException:
            self._calls.pop()
            self.claim.keep(claimed)
            raise

    def close(self, *, flush: bool) -> None:
        """Close the engine, if it was built, and release the claim. See ``Engine.close``."""
        with self._lock:
            self._closed = True
        if self.built is not None:
            self.built.close(flush=flush)
        else:
            self._release()

    def _release(self) -> None:
        """Give up the parameters and the ranks of an optimizer that has no engine."""
        self.claim.release()
        if self._ranks is not None:
            self._ranks.close()

    def abandon(self) -> None:
        """Close the engine of a garbage-collected optimizer: apply due updates, and drop the update windows.

        Update windows are not flushed: the time of collection is arbitrary, so runs would differ.
        """
        engine = self.built
        if engine is None:
            self._release()
        if engine is None or engine.closed:
            return
        with suppress(Exception):
            # The garbage collector may run in a worker, which cannot join itself.
            if engine.registry.runs(threading.current_thread()):
                threading.Thread(target=engine.close, kwargs={"flush": False}, name="zenflow-close").start()
            else:
                engine.close(flush=False)

    def _build(self) -> Engine:
        self.check_open()
        if self._ranks is None and not self._alone:
            rank_group(None, self.claim.params, self.claim.params[0].device)  # there may be several ranks by now
        if self.built is not None:
            if not self.built.outdated:
                return self.built
            self.built.detach()
            self.built.close(flush=False)
            self.built = None
            ops.register_claim(self.claim)
        named = _named(self._groups)
        device = self.claim.params[0].device
        refuse_sharded(self.claim.params)  # again: a strategy may have sharded them since construction
        check_devices(self.claim.params, device)
        _check_offloaded_weights(self._given, alone=self._ranks is None)
        options = _resolve(self._given, named, in_backward=self._updating_in_backward)
        if self._ranks is not None:
            options = agreed(self._ranks, self._given, options, self._groups, self.claim.params)
        sharded = sharding_of(self.claim.params) is not None
        engine = Engine(
            self._groups,
            options,
            device,
            in_backward=self._updating_in_backward,
            ranks=self._ranks,
            sharded=sharded,
        )
        try:
            for first, stop in pairwise((0, *self._calls)):
                engine.add_params(named[first:stop], first)
        except BaseException:
            engine.close(flush=False)
            raise
        self._options = options
        self.claim.listen()
        engine.attach(self.claim, self._backward_ended)
        self.built = engine
        ops.unregister_claim(self.claim)
        record_new_engine(engine)
        return engine

    def _check_plan(self, params: Sequence[Parameter]) -> None:
        """Plan ``params`` and drop the plan, so that construction raises every error that needs no allocation."""
        if self._options.nvme_path is not None and (self._options.in_files or self._options.policy == "auto"):
            existing_directory(self._options.nvme_path)
        if _chosen_by_model(self._options):
            return
        worker_cores(self._options)
        plan = empty_plan(self._options)
        if self._ranks is not None and sharding_of(params) is None:
            plan = empty_plan(self._options, self._ranks.rank, self._ranks.size)
        named = _named(self._groups)
        for first, stop in pairwise((0, *self._calls)):
            new = [pair for group in named[first:stop] for pair in group]
            upto = [local_part(param) for param in params[: len(plan.params) + len(new)]]
            plan = checked_plan(plan, upto, new, self._options, processes=local_ranks().size)


def check_devices(params: Sequence[Tensor], device: torch.device) -> None:
    """Refuse parameters on several devices.

    Raises:
        ValueError: a parameter is not on ``device``.
    """
    for param in params:
        if param.device != device:
            raise ValueError(
                f"a parameter is on {param.device} and the others are on {device}; move the model to one device first "
                '(without device_map="auto" or pipeline stages), or use one optimizer per device'
            )


def _check_offloaded_weights(options: Options, *, alone: bool) -> None:
    """Refuse ``offload_weights`` where this version does not serve it.

    Raises:
        ValueError: several ranks train.
    """
    if options.offload_weights is not False and not alone:
        raise ValueError(
            f"offload_weights={options.offload_weights!r} with several ranks is not supported in this version; pass "
            "offload_weights=False, and shard the model by fully_shard (FSDP2), which divides the weights, too"
        )


def _chosen_by_model(options: Options) -> bool:
    """Whether the performance model chooses some of the options."""
    return options.policy == "auto" or options.measures_stride


def _resolve(options: Options, named: Sequence[Sequence[tuple[str, Parameter]]], *, in_backward: bool) -> Options:
    """Let the performance model choose the options that are left to it, from measurements of this machine."""
    if not _chosen_by_model(options):
        return options
    from zenflow_compile.prediction import auto_policy  # its equations import sympy, which takes a third of a second
    from zenflow_compile.prediction.scenario import Scenario

    pairs = [pair for group in named for pair in group]
    machine = measured_hardware(options, [param for _, param in pairs])
    specs = specs_of(pairs)
    if options.policy != "auto":
        return auto_policy.resolve_stride(options, machine, specs)
    assert options.tokens_per_step is not None
    model, tokens = auto_policy.shape_of(specs), options.tokens_per_step
    return auto_policy.choose(
        Scenario(model=model, hardware=machine, tokens=tokens, options=options, in_backward=in_backward)
    )


def _named(groups: Sequence[dict[str, Any]]) -> list[list[tuple[str, Parameter]]]:
    """Return (name, parameter) pairs by group; an unnamed parameter is called after its index in the optimizer.

    Of a sharded parameter, the part that this rank has.
    """
    named: list[list[tuple[str, Parameter]]] = []
    first = 0
    for group in groups:
        names = group.get("param_names") or [f"param{first + offset}" for offset in range(len(group["params"]))]
        named.append([(name, local_part(param)) for name, param in zip(names, group["params"], strict=True)])
        first += len(names)
    return named


@atexit.register
def _close_all() -> None:
    """Apply due updates before the interpreter unloads modules: operators that run after that abort the process."""
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            with suppress(Exception):
                engine.close(flush=False)
