"""Builds the engine of an optimizer at its first use."""

from __future__ import annotations

import atexit
import gc
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.measure.this_machine import measured_hardware
from zenflow_compile.native.library import rule_address
from zenflow_compile.options.options import Options
from zenflow_compile.planning.planners import check_matrices, empty_plan
from zenflow_compile.rules.rule import Rule
from zenflow_compile.rules.tracing import trace
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.forked_engine import ForkedEngine
from zenflow_compile.runtime.host.cores import LocalRanks, local_ranks, note_local_ranks
from zenflow_compile.runtime.host.host_kernel import check_native_code
from zenflow_compile.runtime.nvme.state_file import existing_directory
from zenflow_compile.runtime.parameters.capacity import checked_plan, specs_of, worker_cores
from zenflow_compile.runtime.parameters.claim import Claim
from zenflow_compile.runtime.parameters.host_weights import check_room
from zenflow_compile.runtime.ranks.agreement import agreed, rank_group
from zenflow_compile.runtime.ranks.rank_group import RankGroup
from zenflow_compile.runtime.sharding import local_parts, refuse_other_sharding, refuse_sharded, sharding_of
from zenflow_compile.timeline import record_new_engine


class LazyEngine:
    """Builds the engine of one optimizer at its first use, from the parameters as they are then.

    Wrappers that copy or share the optimizer's attributes (Lightning's, Fabric's) share this object, so all of them use
    the same engine.

    A parameter has one optimizer. A later one takes it over: the earlier one applies what it has, and ends.

    Args:
        backward_ended: called with the optimizer after each backward.
        ranks: that divide the parameters; None: this process trains alone.

    Raises:
        ValueError: an option or the plan cannot work; see ``existing_directory``, ``worker_cores`` and
            ``checked_plan``. Nothing has been changed then.

    Attributes:
        claim: on the optimizer's parameters.
        built: the engine, even if it is closed or outdated; None before the first use.
    """

    def __init__(
        self,
        optimizer: Any,
        given: Options,
        rules: Sequence[Rule],
        backward_ended: Callable[[Any], None],
        ranks: RankGroup | None,
    ) -> None:
        self.built: Engine | None = None
        self._ranks = ranks
        if ranks is not None:
            note_local_ranks(LocalRanks(*ranks.on_machine))
        self._alone = optimizer._trains_alone
        self._closed = self._taken_over = False
        self._given = self._options = given
        self._rules = rules  # by group, as those: one that is added has its own
        self._kind = type(optimizer).__name__
        self._updating_in_backward = optimizer._steps_in_backward
        self._backward_ended = backward_ended
        self._lock = threading.RLock()  # first gradients may arrive in several threads at once
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        # Number of groups after construction and after each add_param_group(). The groups of one call are planned
        # together, before and after the engine is built, so that a resumed run gets the plan of the saved one.
        self._calls = [len(self._groups)]
        params = [param for group in self._groups for param in group["params"]]
        check_native_code()
        for rule in rules:
            _compile(rule)
        given.check_weights_of_ranks(several=ranks is not None)
        if given.offload_weights == "auto":
            check_room(device_of(params[0].device))
        earlier = _owners_of(params)
        self._check_plan(params, freed=sum(each.host_bytes for each in earlier))
        self.claim = Claim(optimizer)
        self._claim(params, earlier)
        _warn_of_files(rules, given)

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
        if engine is None or engine.core.closed or (not engine.core.used and engine.outdated):
            with self._lock:
                engine = self._build()
        return engine

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called, or an error has closed the engine."""
        return self._closed or (self.built is not None and self.built.core.closed)

    @property
    def host_bytes(self) -> int:
        """Host memory that ends with the engine; 0 before it is built."""
        return 0 if self.built is None or self.is_closed else self.built.registry.host_bytes

    def check_open(self) -> None:
        """
        Raises:
            RuntimeError: the optimizer is closed.
        """
        if self._taken_over:
            raise RuntimeError(
                f"this {self._kind} has ended: another one, created later, has taken parameters of it over; go on with "
                "that one, or, to train with both, give each parameter to one of them and create both again"
            )
        if self.is_closed:
            raise RuntimeError(f"this {self._kind} is closed; create a new one and compile the model again")

    def add_group(self, engine: Engine | None, params: Sequence[Parameter]) -> None:
        """Claim and plan ``params`` of a group that was added to the optimizer, and to ``engine`` if there is one.

        Raises:
            ValueError: as at construction. Only the optimizer's ``param_groups`` have changed then.
        """
        claimed = len(self.claim.params)
        self._calls.append(len(self._groups))
        earlier = _owners_of(params)
        freed = sum(each.host_bytes for each in earlier)
        try:
            refuse_other_sharding(self.claim.params, params)
            _compile(self._rules[-1])
            named = _named(self._groups)[-1:]
            if engine is None:
                self._check_plan([*self.claim.params, *params], freed=freed)
            else:
                engine.registry.plan_with(named, len(self._groups) - 1, freed=freed)
            self._claim(params, earlier)
            if engine is not None:
                if self._ranks is not None:
                    agreed(self._ranks, self._given, engine.options, self._groups, self.claim.params)
                engine.add_params(named, len(self._groups) - 1)
        except BaseException:
            self._calls.pop()
            self.claim.keep(claimed)
            raise
        _warn_of_files(self._rules[-1:], self._options)

    def _claim(self, params: Sequence[Parameter], earlier: Sequence[LazyEngine]) -> None:
        """Claim ``params``, which ``earlier`` optimizers give up with a warning; several ranks in the same order."""
        if earlier:
            lost = [error for each in earlier if (error := each._give_up()) is not None]
            warnings.warn(_takeover_text(len(earlier), lost), stacklevel=user_stacklevel())
        self.claim.add(params)

    def _give_up(self) -> BaseException | None:
        """End for an optimizer that takes parameters of this one over: apply update windows, and all updates.

        Gradients that no step has used stay in ``.grad``.

        Returns:
            What has failed, now or earlier: updates are lost then.

        Raises:
            torch.OutOfMemoryError: the device has no room for what ``offload_all`` has moved. Nothing has been changed.
        """
        lost: BaseException | None = None
        if (engine := self.built) is not None and not self._closed:
            try:
                engine.reload_all()
                engine.registry.release_gradients(keep=True)  # close() of one of several ranks could not wait for them
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                lost = error.__cause__ or error
        try:
            self.close(flush=True)
        except Exception as error:
            lost = lost or error
        self._taken_over = True
        if isinstance(engine, ForkedEngine):  # close() leaves both to the parent
            ops.unregister_engine(engine.id)
            self.claim.release()
        return lost

    def close(self, *, flush: bool) -> None:
        """Close the engine, if it was built, and release the claim. See ``Engine.close``."""
        with self._lock:
            self._closed = True
        if self.built is not None:
            self.built.close(flush=flush)
        else:
            self._release()

    def _release(self) -> None:
        self.claim.release()
        if self._ranks is not None:
            self._ranks.close()

    def abandon(self) -> None:
        """Close the engine of a garbage-collected optimizer: apply due updates, and drop the update windows.

        Update windows are not flushed: the time of collection is arbitrary, so runs would differ. For the same reason
        the warning that they hold gradients comes at exit.
        """
        engine = self.built
        if engine is None:
            self._release()
        if engine is None or engine.core.closed:
            return
        _unapplied.extend(engine.unapplied)
        with suppress(Exception):
            # The garbage collector may run in a lane's thread, which cannot join itself.
            if engine.registry.memory.runs(threading.current_thread()):
                closing = threading.Thread(target=engine.close, kwargs={"flush": False}, name="zenflow-close")
                self.claim.closing = closing
                closing.start()
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
        named = _named(self._groups)
        device = self.claim.params[0].device
        refuse_sharded(self.claim.params)  # again: a strategy may have sharded them since construction
        check_devices(self.claim.params, device)
        self._given.check_weights_of_ranks(several=self._ranks is not None)
        options = _resolve(self._given, named, self._rules, in_backward=self._updating_in_backward)
        if self._ranks is not None:
            options = agreed(self._ranks, self._given, options, self._groups, self.claim.params)
        if _chosen_by_model(self._given):
            _warn_of_files(self._rules, options)
        sharded = sharding_of(self.claim.params) is not None
        engine = Engine(
            self._groups,
            options,
            self._rules,
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
        record_new_engine(engine)
        return engine

    def _check_plan(self, params: Sequence[Parameter], *, freed: int) -> None:
        """Plan ``params`` and drop the plan, so that construction raises every error that needs no allocation.

        Before this optimizer allocates, others end, which have ``freed`` bytes of host memory.
        """
        if self._options.nvme_path is not None and (self._options.in_files or self._options.policy == "auto"):
            existing_directory(self._options.nvme_path)
        check_matrices(specs_of(_named(self._groups), self._rules))
        if _chosen_by_model(self._options):
            return
        worker_cores(self._options)
        plan = empty_plan(self._options)
        if self._ranks is not None and sharding_of(params) is None:
            plan = self._ranks.divided(plan)
        named = _named(self._groups)
        for first, stop in pairwise((0, *self._calls)):
            new = specs_of(named[first:stop], self._rules[first:stop])
            upto = local_parts(params)[: len(plan.params) + len(new)]
            plan = checked_plan(plan, upto, new, self._options, freed=freed, processes=local_ranks().size)


def _compile(rule: Rule) -> None:
    """Compile host updates now, where an error can still be raised without a change."""
    if rule.of_matrix:
        trace(rule)  # a rule of matrices has none
    else:
        rule_address(rule)


def _warn_of_files(rules: Sequence[Rule], options: Options) -> None:
    """Warn if state of matrices stays in host memory where state goes to files."""
    kinds = {type(rule).__name__ for rule in rules if rule.of_matrix}
    if options.in_files and kinds:
        warnings.warn(
            f"state of matrices that are updated whole ({', '.join(sorted(kinds))}) stays in host memory in this "
            "version, and not in files",
            stacklevel=user_stacklevel(),
        )


def _owners_of(params: Sequence[Tensor]) -> list[LazyEngine]:
    """The optimizers that own some of ``params`` and are referred to, in the order of ``params``."""
    if ops.claims_of(params):
        gc.collect()  # trainers and schedulers keep optimizers that nothing else refers to in reference cycles
    claims = cast("list[Claim]", ops.claims_of(params))
    for claim in claims:
        if claim.closing is not None:
            claim.closing.join()  # until then it writes the weights
    return [claim.optimizer._lazy_engine for claim in claims if claim.optimizer is not None]


def _takeover_text(optimizers: int, lost: Sequence[BaseException]) -> str:
    others = "an earlier one, which raises" if optimizers == 1 else f"{optimizers} earlier ones, which raise"
    outcome = "As in close(), open update windows were flushed"
    if lost:
        outcome = (
            f"Updates are lost ({type(lost[0]).__name__}: {lost[0]}): load the last saved weights, unless they were "
            "loaded since"
        )
    return (
        f"this optimizer takes over parameters of {others} from now on. {outcome}. To train with both, give each "
        "parameter to one of them; without this warning, call close() on the earlier one first"
    )


def check_devices(params: Sequence[Tensor], device: torch.device) -> None:
    """
    Raises:
        ValueError: a parameter is not on ``device``.
    """
    for param in params:
        if param.device != device:
            raise ValueError(
                f"a parameter is on {param.device} and the others are on {device}; move the model to one device first "
                '(without device_map="auto" or pipeline stages), or use one optimizer per device'
            )


def _chosen_by_model(options: Options) -> bool:
    """Whether the performance model chooses some of the options."""
    return options.policy == "auto" or options.measures_stride


def _resolve(
    options: Options, named: Sequence[Sequence[tuple[str, Parameter]]], rules: Sequence[Rule], *, in_backward: bool
) -> Options:
    """Let the performance model choose the options that are left to it, from measurements of this machine."""
    if not _chosen_by_model(options):
        return options
    from zenflow_compile.performance.model_shape import shape_of
    from zenflow_compile.prediction import (  # import sympy, which takes a third of a second
        auto_policy,
        forecast,
        strides,
    )

    pairs = [pair for group in named for pair in group]
    machine = measured_hardware(options, [param for _, param in pairs])
    if options.tokens_per_step is None:  # the device's own work is not known: the update alone is made short
        machine = replace(machine, device_flops=math.inf)
    scenario = forecast.Scenario(
        model=shape_of(specs_of(named, rules)),
        hardware=machine,
        tokens=options.tokens_per_step or 1,
        options=options,
        in_backward=in_backward,
    )
    return auto_policy.choose(scenario) if options.policy == "auto" else strides.fastest_stride(options, scenario)


def _named(groups: Sequence[dict[str, Any]]) -> list[list[tuple[str, Parameter]]]:
    """Return (name, parameter) pairs by group; an unnamed parameter is called after its index in the optimizer.

    Of a sharded parameter, the part that this rank has.
    """
    named: list[list[tuple[str, Parameter]]] = []
    parts = iter(local_parts([param for group in groups for param in group["params"]]))
    first = 0
    for group in groups:
        names = group.get("param_names") or [f"param{first + offset}" for offset in range(len(group["params"]))]
        named.append([(name, next(parts)) for name in names])
        first += len(names)
    return named


_unapplied: list[int] = []
"""``Engine.unapplied`` of optimizers that were garbage-collected."""


def note_unapplied(engine: Engine) -> None:
    """Have the warning at exit name update windows that are open now, though they may be flushed before."""
    _unapplied.extend(engine.unapplied)


@atexit.register
def _close_all() -> None:
    """Apply due updates before the interpreter unloads modules: operators that run after that abort the process.

    Warns of update windows that were never applied: only now it is known that no step and no flush comes.
    """
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            _unapplied.extend(engine.unapplied)
            with suppress(Exception):
                engine.close(flush=False)
    if _unapplied:
        warnings.warn(
            f"the update windows of {len(_unapplied)} parameters were never applied, with gradients of up to "
            f"{max(_unapplied)} steps, which a model that was saved after the last step lacks: call optimizer.flush() "
            "before the last save, or pass total_steps= to the optimizer, which then flushes by itself; a run that "
            "resumes from a saved optimizer state loses nothing",
            stacklevel=user_stacklevel(),
        )


os.register_at_fork(after_in_child=_unapplied.clear)
