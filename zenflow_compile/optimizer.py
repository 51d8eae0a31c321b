"""``ZenFlow`` and ``ZenFlowAdamW``: optimizers whose state a plan divides between device and host."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.lazy_engine import LazyEngine, check_devices
from zenflow_compile.options.deepspeed import read_deepspeed_config
from zenflow_compile.options.options import Options
from zenflow_compile.planning.dtypes import TRAINED
from zenflow_compile.rules.adamw import ADAMW
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.checkpoint import save_load
from zenflow_compile.runtime.checkpoint.save_load import TO_CHANGE_STATE
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.parameters.param_groups import check_group
from zenflow_compile.runtime.ranks.agreement import rank_group
from zenflow_compile.runtime.sharding import refuse_replaced_by_shards, refuse_sharded
from zenflow_compile.torch_internals import torch_private
from zenflow_compile.weight_readers import adapt_known_readers

_LEAST_STABLE_SHARE = 0.1  # of the rates at which momentum is stable; a warning tells of update windows that leave less
_NOT_WRITABLE = (
    "shows a state that lives elsewhere: clearing, replacing or writing it changes nothing; assign an empty dict to "
    f"start with new moments, or create a new optimizer, or, {TO_CHANGE_STATE}"
)

_NO_GRADIENT = (
    "step() updates nothing: no parameter of this optimizer has had a gradient. If a backward ran, the model computes "
    "with other parameters than those that the optimizer was given: an assignment, load_state_dict(assign=True) or "
    "Accelerate's cpu_offload, disk_offload or dispatch_model replaced them; leave offloading to this optimizer, and "
    "create it over model.parameters() after the last change of the model"
)


class ZenFlow(torch.optim.Optimizer):
    """Updates parameters by a rule, selected columns on the device and the deferred ones asynchronously on the host.

    Create it before ``torch.compile(model, backend="zenflow")`` sees its first batch; without ``torch.compile`` it
    works as well, with less overlap. State is allocated at the first use (a compilation, a gradient, ``state_dict()``),
    so that the model may be moved to another device or dtype before it. Param groups, learning-rate schedulers,
    closures, hooks and ``state_dict`` work as in any PyTorch optimizer. ``.grad`` of an offloaded parameter is a tensor
    without memory, which PyTorch's clipping, ``GradScaler`` and hooks see like any other. Its values are gone after
    ``step()`` has consumed it.

    A parameter has one optimizer. One that is created over parameters of an earlier one takes them over, with a
    warning: the earlier one applies its open update windows, keeps no state, and raises from then on.

    Args:
        params: parameters, (name, parameter) pairs, or param groups. Reports and errors show the names.
        rule: of ``zenflow_compile.rules``, or another one, with the numbers that param groups have by default, which
            may differ between groups and change at any time. A group with a ``rule`` of its own has that one's.
        maximize: as in PyTorch's optimizers; may differ between groups, too.
        process_group: the ranks that train this model together, as a process group or a device mesh: gradients are
            averaged over them, and each rank has its share of the state and of the updates of offloaded parameters.
            The ranks of a machine, or of a row of a mesh of two dimensions, divide one copy; there is a copy for each.
            All ranks make the same calls. False: this rank trains alone, or the loop averages gradients by itself
            (DistributedDataParallel, ``all_reduce(p.grad)``). None: one process trains, or ``fully_shard`` has sharded
            the model, which brings its ranks.
        **options: where state lives and when it is updated; see :class:`~zenflow_compile.options.options.Options`
            (``policy``, ``topk_ratio``, ``update_interval``, ``select_interval``, ``overlap_step``, ...).

    Raises:
        ValueError: a value out of range, parameters on different devices, several ranks and no ``process_group``, a
            group that does not hold this rank, or more host memory needed than there is. Nothing has been changed
            then. Errors that only the first use can find raise there: ``policy="auto"`` where nothing fits, or an
            unusable ``nvme_path``.
        TypeError: an unknown option, or a complex or sparse parameter, or one of 8 bits that requires a gradient.
    """

    _steps_in_backward = False

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        *,
        maximize: bool = False,
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None = None,
        **options: Any,
    ) -> None:
        _check_rule(rule)
        # Of this name a state of another rule is refused; PyTorch's optimizers have no such number.
        self._set_up(params, rule, {"rule": type(rule).__name__, "maximize": maximize}, process_group, options)

    def _set_up(
        self,
        params: Iterable[Any],
        rule: Rule,
        numbers: Mapping[str, Any],
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None,
        options: Mapping[str, Any],
    ) -> None:
        """``numbers``: of param groups, where they are not those of the rule."""
        given = Options.from_keywords(**options)
        given.warn_of_unread()
        self._rule, self.rules = rule, list[Rule]()
        self._stepped = False
        self._warned_of_no_gradient = False
        defaults = {**dict(rule.numbers), **rule.fixed, **numbers}
        check_group(defaults, rule)  # also where every group overrides them
        super().__init__(_iterable(params), defaults)
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            raise ValueError("params has groups but no parameter; give the optimizer the model's parameters")
        check_devices(params, params[0].device)
        _warn_of_windows(self.param_groups, self.rules, given)
        self._trains_alone = process_group is False
        ranks = rank_group(process_group, params, params[0].device)
        self._lazy_engine = LazyEngine(self, given, self.rules, _backward_ended, ranks)
        adapt_known_readers()

    @property
    def options(self) -> Options:
        """The options of this optimizer.

        Under ``policy="auto"`` with the policy and its ``ratio``, ``update_stride``, ``device_share`` and
        ``offload_device`` decided, likewise ``update_stride="auto"``: reading them then is a first use. Groups that are
        added later are planned under the same choice.
        """
        return self._lazy_engine.options

    @property
    def engine(self) -> Engine:
        """The runtime behind this optimizer, built now if this is the optimizer's first use.

        It is built again if the model was moved or cast since, and there has been no compilation and no gradient.

        Raises:
            RuntimeError: the optimizer is closed.
            ValueError: see :class:`ZenFlow`; the next use tries again.
        """
        return self._lazy_engine.engine

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """For each parameter ``step``: f32[], the number of gradients it has taken, brought up to date by each read.

        The other entries raise when they are used: ``state_dict()`` makes them. To change it, change its tensors
        and load it. After a write to any of ``state`` the next ``step()`` raises. An empty mapping that is assigned has
        all parameters begin again, without moments and at step 0.
        """
        if not self._lazy_engine.is_closed and not self._state_was_edited:  # else the next step says so
            self._show_steps()
        return self._states

    @state.setter
    def state(self, states: defaultdict[Tensor, dict[str, Any]]) -> None:
        if not hasattr(self, "_states"):
            self._states = states
            self._steps_shown: list[save_load.ShownStep] = []
        elif isinstance(states, Mapping) and not states:
            save_load.begin_again(self.engine, self.param_groups)
            self._states.clear()
            self._show_steps()
        else:
            raise AttributeError(f"optimizer.state {_NOT_WRITABLE}")

    def _show_steps(self) -> None:
        self._steps_shown[:] = save_load.show_steps(self.engine, self._states)  # a wrapper may share the list

    @property
    def _state_was_edited(self) -> bool:
        """Whether ``optimizer.state`` was cleared or written since it was shown; entries of other tensors may be added.

        Lightning replaces each entry by an equal one.
        """
        return any(
            shown.step._version != shown.version
            or (entry := self._states.get(shown.param)) is None
            or not save_load.is_as_shown(entry)
            for shown in self._steps_shown
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of optimizer state on the device, staging buffers included."""
        return self.engine.registry.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer state, gradient buffers and upload buffers in host memory."""
        return self.engine.registry.host_bytes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Existing ones keep their state, phases and update windows.

        Parameters of another optimizer are taken over, as at construction.

        Raises:
            ValueError, TypeError: as at construction; nothing has been changed then.
        """
        constructing = not hasattr(self, "_lazy_engine")  # the base class adds the groups that it was given
        if not constructing:
            self._lazy_engine.check_open()
        given, param_group = param_group, _materialized(param_group)
        rule = self._rule_of(param_group)
        has_own = rule is not self._rule or isinstance(param_group.get("rule"), Rule)
        if has_own:
            numbers = {**dict(rule.numbers), **rule.fixed, "maximize": self.defaults["maximize"]}
            param_group = {**numbers, **param_group, "rule": type(rule).__name__}
        check_group(param_group if has_own else {**self.defaults, **param_group}, rule)
        params = [param[1] if isinstance(param, tuple) else param for param in param_group["params"]]
        for param in params:
            _check_param(param)
        if len({id(param) for param in params}) < len(params):
            raise ValueError("a parameter is in its group twice; model.parameters() has each one once")
        _check_names([*self.param_groups, param_group])
        given["params"] = param_group["params"]
        if not has_own:
            param_group = given  # as in PyTorch, the caller's dict is the group
        if constructing:
            self._append_group(param_group, rule)
            return
        check_devices(params, self._lazy_engine.claim.params[0].device)
        engine = None if self._lazy_engine.built is None else self.engine
        self._append_group(param_group, rule)
        try:
            self._lazy_engine.add_group(engine, params)
        except BaseException:
            self.param_groups.pop()
            self.rules.pop()
            raise

    def _append_group(self, group: dict[str, Any], rule: Rule) -> None:
        """Add a checked group. One of another rule has that rule's numbers alone, without the optimizer's defaults."""
        names = {*group, "param_names"}
        super().add_param_group(group)
        for name in group.keys() - names if rule is not self._rule else ():
            del group[name]
        self.rules.append(rule)

    def _rule_of(self, group: Mapping[str, Any]) -> Rule:
        """The rule of a new group: its own, of which it may have the name if another one has it, or the optimizer's."""
        rule = group.get("rule", self._rule)
        known = {type(each).__name__: each for each in (*self.rules, self._rule)}
        if isinstance(rule, str) and rule in known:
            return known[rule]
        _check_rule(rule)
        if rule is not self._rule and isinstance(self, ZenFlowAdamW):
            raise TypeError(
                f"a param group of a ZenFlowAdamW has the rule {type(rule).__name__}; for groups of several rules pass "
                "the others' to ZenFlow(params, AdamW(...)) of zenflow_compile and zenflow_compile.rules"
            )
        return cast("Rule", rule)

    @torch_private.outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of the backwards since the last step.

        Selected columns are updated now. Updates of flushed update windows become visible at the parameter's next
        use. Without any gradient nothing happens, and the step does not count; one warning says so if no parameter has
        had a gradient yet.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: a gradient was consumed by an earlier step (call ``zero_grad()`` after each), the model was
                changed since the first use, ``optimizer.state`` was cleared or written, a closed optimizer, or
                asynchronous work that failed (chained to the original error).
            ValueError, TypeError: a value in ``param_groups`` that no step can use, or parameters that a strategy has
                sharded since the optimizer was created. Nothing has been changed then.
        """
        lazy = self._lazy_engine
        lazy.check_open()
        if self._state_was_edited:
            raise RuntimeError(f"optimizer.state was cleared or written; it {_NOT_WRITABLE}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lazy.claim.check_params(self.param_groups)
        if not self._stepped:
            refuse_replaced_by_shards([param for param in lazy.claim.params if param.grad is None])
            self._stepped = True
        if lazy.built is None and all(param.grad is None for param in lazy.claim.params):
            self._warn_of_no_gradient()
            return loss
        engine = lazy.engine
        engine.check_parameters()
        if not engine.run_step() and not engine.core.used:
            self._warn_of_no_gradient()
        return loss

    def _warn_of_no_gradient(self) -> None:
        if not self._warned_of_no_gradient:
            self._warned_of_no_gradient = True
            warnings.warn(_NO_GRADIENT, stacklevel=user_stacklevel())

    @torch_private.outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients, as ``model.zero_grad()`` and ``param.grad = None`` do.

        Args:
            set_to_none: False sets gradients to zero instead. A step uses zeros, as in PyTorch: moments and weights
                decay.
        """
        self._lazy_engine.check_open()
        super().zero_grad(set_to_none)
        if (engine := self._lazy_engine.built) is not None:
            engine.intake.discard()

    @torch_private.outside_of_graphs
    def offload_all(self) -> None:
        """Give back the device memory of everything that the optimizer has there, until it is used next.

        State and gradients that no step has used move to host memory, and buffers are freed. The trajectory stays what
        it would have been. The next backward, ``step()``, ``flush()``, ``load_state_dict()`` or ``close()`` brings all
        of it back, as ``reload_all()`` does; ``state_dict()`` reads it where it is. Weights, and gradients of resident
        parameters in ``.grad``, are the model's and stay; ``offload_weights`` unloads its weights.

        The memory returns to PyTorch's allocator: call ``torch.cuda.empty_cache()`` for other processes. The host's is
        kept for the next call. Blocks until the device is idle. Each of several ranks gives back its own.

        Raises:
            RuntimeError: a backward or a step runs, work in flight failed, or the optimizer is closed.
            MemoryError: the host has no room. Nothing has been moved then.
        """
        self._lazy_engine.check_open()
        if self._lazy_engine.built is not None:
            self.engine.offload_all()

    @torch_private.outside_of_graphs
    def reload_all(self) -> None:
        """Have everything on the device again that ``offload_all()`` has moved, before it is used.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of it. Nothing has been moved then; free memory
                there, and call it again.
            RuntimeError: a copy failed, or the optimizer is closed.
        """
        self._lazy_engine.check_open()
        if self._lazy_engine.built is not None:
            self.engine.reload_all()

    def synchronize(self) -> None:
        """Wait for work in flight and make due updates visible, before weights are read outside of compiled graphs.

        The trajectory stays what it would have been. Weights that ``offload_weights`` keeps in host memory are on the
        device until the next step; ``state_dict()`` of a module has them without.

        Raises:
            RuntimeError: work in flight failed.
        """
        self.engine.access.synchronize()
        self.engine.access.hold_weights()

    @contextmanager
    def loaded_weights(self) -> Iterator[None]:
        """Have all weights on the device inside of the block, with due updates, for code that reads or writes them.

        Only ``offload_weights`` takes weights away. What the block writes into them is kept; a write through ``.data``
        needs ``torch.autograd.graph.increment_version(param)``.

        Raises:
            RuntimeError: work in flight failed, or, at the end, a sample of a weight shows a write without that.
        """
        engine = self.engine
        engine.access.synchronize()
        engine.access.hold_weights()
        try:
            yield
        finally:
            engine.access.release_weights()

    @torch.no_grad()
    def flush(self) -> None:
        """Apply the gradients in update windows and make every update visible. Training may continue afterwards.

        Call it before a model is saved that is not trained on with this state: with ``update_interval`` above 1, a
        model that is saved last holds every gradient only then. It is not needed for a checkpoint to resume from,
        since ``state_dict()`` has the windows. A flush changes the trajectory: windows restart empty and keep their
        phases. Gradients in ``.grad`` that no step has used stay there. Weights that were written by hand or loaded
        since the last step stay as they are: the windows' gradients of these parameters are dropped, with a warning,
        unless ``synchronize()`` was called after the write.

        Raises:
            RuntimeError: a closed optimizer, work in flight that failed, or an earlier step that failed half-way; load
                a saved state then.
        """
        self._lazy_engine.check_open()
        if (engine := self._lazy_engine.built) is not None:
            engine.flush()
            engine.access.hold_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return all state that a bitwise resume needs, also inside an update window; loads with ``weights_only=True``.

        Like ``.grad``, gradients that no step has used yet are not part of it.

        Returns:
            ``state`` and ``param_groups``, as PyTorch's optimizers have them. ``state`` has tensors on the host alone,
            whose names, shapes and dtypes depend on the parameters and options: ``step``, the arrays of the rule (of
            AdamW ``exp_avg`` and ``exp_avg_sq``) and what else a resume needs.

        Raises:
            ValueError: parameters in ``param_groups`` were changed by hand.
            RuntimeError: work in flight failed, or the optimizer is closed.
        """
        engine = self.engine
        for hook in torch_private.optimizer_hooks(self, "state_dict_pre"):
            hook(self)
        self._lazy_engine.claim.check_params(self.param_groups)
        with engine.calls.announcing():
            engine.access.synchronize()
            state = save_load.state_dict(engine, self.param_groups)
        for hook in torch_private.optimizer_hooks(self, "state_dict_post"):
            state = _or_else(hook(self, state), state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``. Weights may be loaded before or after.

        Gradients stay in ``.grad``, as with PyTorch's optimizers; after an error of a backward or a step they are
        discarded, and so they are in the optimizer-in-backward form.

        Of a state that another number of ranks saved in the middle of update windows, these are flushed, and the
        weights must be loaded before: other ones are refused here, and later ones by their first use.

        Args:
            state_dict: of an optimizer with the same rule, or of that of PyTorch, whose update windows are empty.
                Parameters are matched by their order in the param groups, whatever they are called there.

        Raises:
            ValueError, TypeError: the state belongs to another model or plan, is not complete, has a value that no step
                can use, or is none, or there are several ranks and gradients that no step has used; nothing has changed
                then. After anything else, such as a failure of memory or disk,
                no step runs until a state has been loaded.
        """
        engine = self.engine
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is a {type(state_dict).__name__}; give what state_dict() returned")
        state_dict = state_dict.copy()  # hooks may change it
        for hook in torch_private.optimizer_hooks(self, "load_state_dict_pre"):
            state_dict = _or_else(hook(self, state_dict), state_dict)
        self._lazy_engine.claim.check_params(self.param_groups)
        save_load.load_state_dict(engine, self.param_groups, state_dict)
        self._states.clear()
        self._show_steps()
        for hook in torch_private.optimizer_hooks(self, "load_state_dict_post"):
            hook(self)

    def close(self) -> None:
        """End training: apply the gradients in update windows and all updates, free host memory."""
        self._lazy_engine.close(flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        with suppress(RuntimeError):  # the exception that left the block is the root cause
            self._lazy_engine.close(flush=False)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit engines have closed before, and globals may be gone: a default argument is not.
        if is_finalizing():
            return
        lazy_engine: LazyEngine | None = getattr(self, "_lazy_engine", None)
        # A wrapper that shares our attributes (Lightning's, Fabric's) may be collected before us.
        if lazy_engine is None or ((owner := lazy_engine.claim.optimizer) is not None and owner is not self):
            return
        lazy_engine.abandon()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        Raises:
            TypeError: always. Threads and host memory cannot be copied, nor parameters owned by two optimizers.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; save its state_dict(), and load it into a new one "
            "over the other model's parameters"
        )


class ZenFlowAdamW(ZenFlow):
    """AdamW that updates selected columns on the device and the deferred ones asynchronously on the host.

    See :class:`ZenFlow`, of which it is the one with AdamW's rule and arguments.

    Args:
        params: parameters, (name, parameter) pairs, or param groups. Reports and errors show the names.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; may differ between groups and change at any
            time.
        foreach, fused: keywords of ``torch.optim.AdamW``, without effect: updates are always fused.
        amsgrad, capturable, differentiable: keywords of ``torch.optim.AdamW``, accepted only with values that have no
            effect: False and None.
        config: a DeepSpeed configuration, as a path or a dict, for everything that the other arguments leave out; see
            :func:`~zenflow_compile.options.deepspeed.read_deepspeed_config`.
        process_group: as in :class:`ZenFlow`.
        **options: as in :class:`ZenFlow`.

    Raises:
        ValueError, TypeError: as in :class:`ZenFlow`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        process_group: ProcessGroup | DeviceMesh | Literal[False] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        if config is not None:
            passed = {name: value for name, value in numbers.items() if was_given(name, value)}
            read = read_deepspeed_config(config, **passed, **options)
            numbers |= {name: read.pop(name) for name in numbers if name in read}
            options = read
        switches = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach}
        switches |= {"capturable": capturable, "differentiable": differentiable, "fused": fused}
        switches["decoupled_weight_decay"] = True  # of AdamW: PyTorch loads a state into groups of the same names
        self._set_up(params, ADAMW, numbers | switches, process_group, options)

    @classmethod
    def _updating_in_backward(cls, named_params: Sequence[tuple[str, Parameter]], **keywords: Any) -> ZenFlowAdamW:
        """The optimizer of a model compiled with options and no optimizer object: steps at the end of each backward."""
        optimizer = cls.__new__(cls)
        optimizer._steps_in_backward = True
        cls.__init__(optimizer, named_params, **keywords)
        return optimizer


_PARAMETERS = inspect.signature(ZenFlowAdamW).parameters


def was_given(name: str, value: object) -> bool:
    """Whether a caller of ``ZenFlowAdamW`` has passed ``value``: an equal number is another object than the default."""
    return value is not _PARAMETERS[name].default


def _backward_ended(optimizer: ZenFlow) -> None:
    """Step after the last declared backward, in the optimizer-in-backward form."""
    engine = optimizer.engine
    if engine.backward.count >= (optimizer.options.gradient_accumulation_steps or 1) and engine.steps.has_gradients:
        optimizer.step()
        optimizer.zero_grad()


def _warn_of_windows(groups: Sequence[Mapping[str, Any]], rules: Sequence[Rule], given: Options) -> None:
    """Warn if update windows leave little of the rates at which a rule's momentum is stable."""
    steps = given.longest_window if given.policy == "zenflow" else 1
    pairs = [(float(group.get("momentum", 0.0)), rule) for group, rule in zip(groups, rules, strict=True)]
    shares = {(type(rule).__name__, momentum): rule.stable_share(momentum, steps) for momentum, rule in pairs}
    for (kind, momentum), share in shares.items():
        if momentum and share < _LEAST_STABLE_SHARE:
            warnings.warn(
                f"{kind} with momentum={momentum:g} in update windows of up to {steps} steps is stable up to "
                f"{share:.1%} of the rate that it has without windows: momentum goes on by gradients of weights "
                "that have not moved. Pass update_interval=1, a lower lr, or less momentum",
                stacklevel=user_stacklevel(),
            )


def _check_rule(rule: object) -> None:
    """Raise TypeError if ``rule`` is no rule, or was not made as one."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule={rule!r} must be an instance of a rule, such as zenflow_compile.rules.Lion(lr=1e-4), and is of "
            f"type {type(rule).__name__}"
        )
    if not hasattr(rule, "numbers"):
        raise TypeError(f"{type(rule).__name__}.__init__ must call super().__init__(**numbers); add the call")


def _or_else(changed: dict[str, Any] | None, state: dict[str, Any]) -> dict[str, Any]:
    return state if changed is None else changed


def _iterable(params: Any) -> Any:
    """
    Raises:
        TypeError: ``params`` is a module, a set, or nothing to iterate over.
    """
    if isinstance(params, (set, frozenset)):  # its order would change between runs, and a resume mix parameters up
        raise TypeError("params is a set, which has no order; give a list of parameters")
    if isinstance(params, Module) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is of type {type(params).__name__}; give the parameters, as in model.parameters() or "
            "model.named_parameters(), or a list of param groups"
        )
    return params


def _check_names(groups: Sequence[dict[str, Any]]) -> None:
    """
    Raises:
        ValueError: two parameters have one name. Reports and errors could not tell them apart.
    """
    counts = Counter(
        param[0] if isinstance(param, tuple) else name
        for group in groups
        for param, name in zip(group["params"], group.get("param_names", repeat(None)), strict=False)
    )
    for name, count in counts.items():
        if name is not None and count > 1:
            raise ValueError(
                f"{count} parameters have the name {name!r}; give each its own, as model.named_parameters() does"
            )


def _materialized(group: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(group, dict):
        raise TypeError(f"a param group is of type {type(group).__name__}; give a dict, as in {{'params': [...]}}")
    if "params" not in group:
        raise ValueError(f"a param group has no 'params', only {list(group)}; give its parameters under that key")
    params = group["params"] if isinstance(group["params"], Tensor) else _iterable(group["params"])
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _check_param(param: Any) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"params has a {type(param).__name__}; give tensors, (name, tensor) pairs, or groups of them")
    if is_lazy(param):  # first: it answers no other question
        raise ValueError(
            "a parameter is not initialized yet (it is of a lazy module); run the model once before creating the "
            "optimizer"
        )
    if param.is_nested:
        raise TypeError(
            "a parameter is a nested tensor; only dense (strided) parameters can be optimized: give a padded tensor, "
            "or one parameter for each of its components"
        )
    refuse_sharded([param])
    if param.is_complex() and param.requires_grad:
        raise TypeError(
            f"a parameter has dtype {param.dtype}; only real floating-point parameters can be optimized: "
            "leave it out of the optimizer, or view it as real"
        )
    if param.requires_grad and param.dtype not in TRAINED:
        raise TypeError(
            f"a parameter has dtype {param.dtype}; only parameters of {', '.join(map(str, TRAINED))} can be optimized: "
            "set requires_grad=False, leave it out of the optimizer, or train weights of one of these and cast them in "
            "the forward"
        )
    if param.layout != torch.strided:
        raise TypeError(f"a parameter has layout {param.layout}; only dense (strided) parameters can be optimized")
    if param.device.type == "meta":
        raise ValueError(
            "a parameter is on the meta device; materialise the model before creating the optimizer, without a "
            'device_map (of device_map="auto", dispatch_model) that leaves some of its weights for later'
        )
