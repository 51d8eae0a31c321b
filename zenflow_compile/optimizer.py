"""``ZenFlowAdamW``: AdamW whose state lives where a plan puts it, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from zenflow_compile import torch_private
from zenflow_compile.options import Options
from zenflow_compile.passes.pipeline import fused_step_graph
from zenflow_compile.planning.policies import empty_plan, stride_weight_bytes
from zenflow_compile.profiling.timeline import record_new_engine
from zenflow_compile.runtime import checkpoint, ops
from zenflow_compile.runtime.claim import Claim
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.file_store import existing_directory
from zenflow_compile.runtime.measured_hardware import measured_hardware
from zenflow_compile.runtime.param_groups import check_group
from zenflow_compile.runtime.roster import checked_plan, specs_of, worker_cores
from zenflow_compile.runtime.sharding import refuse_replaced_by_shards, refuse_sharded
from zenflow_compile.unread_options import warn_of_unread

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NOT_WRITABLE = (
    "shows a state that lives elsewhere: clearing, replacing or writing it changes nothing; create a new optimizer to "
    "start with new moments, or call load_state_dict()"
)


class ZenFlowAdamW(torch.optim.Optimizer):
    """AdamW with column-selected updates on the device and asynchronous updates of the rest on the host.

    Create it before ``torch.compile(model, backend="zenflow")`` sees its first batch; without ``torch.compile`` it
    works as well, with less overlap. State is allocated at the first use (a compilation, a gradient, ``state_dict()``),
    so that the model may be moved to another device or dtype before it. Param groups, learning-rate schedulers,
    closures, hooks and ``state_dict`` are those of any PyTorch optimizer. ``.grad`` of an offloaded parameter is a
    tensor without memory of its own, which PyTorch's clipping, ``GradScaler`` and hooks see as any other. Its values
    are gone once ``step()`` has consumed it.

    Args:
        params: parameters, (name, parameter) pairs, or param groups. Names make reports readable.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; may differ between groups and change at any
            time.
        amsgrad, foreach, capturable, differentiable, fused: keywords of ``torch.optim.AdamW``, taken at the values that
            change nothing: False and None.
        **options: where state lives and when it is updated; see :class:`~zenflow_compile.options.Options`
            (``policy``, ``topk_ratio``, ``update_interval``, ``select_interval``, ``overlap_step``, ...).

    Raises:
        ValueError: a value out of range, parameters on different devices, a parameter that another live optimizer of
            this kind owns, or more host memory needed than there is. Nothing has been changed then. What only the
            first use can find raises there: ``policy="auto"`` where nothing fits, or an unusable ``nvme_path``.
        TypeError: an unknown option, or a complex, integer, 8-bit or sparse parameter.
    """

    _steps_in_backward = False

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
        **options: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._closed = False
        self._stepped = False
        self._given = self._options = Options.from_keywords(**options)
        warn_of_unread(self._given)
        self._building = threading.RLock()  # first gradients may arrive in several threads
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        check_group(defaults)  # they count even where every group has values of its own
        super().__init__(_iterable(params), defaults)
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            raise ValueError("params has groups but no parameter; give the optimizer the model's parameters")
        _check_device_and_owner(params, params[0].device)
        # The number of groups after construction and after each add_param_group(): what comes with one call is planned
        # together, whether the engine exists by then or not, so that a resumed run has the plan of the saved one.
        self._calls = [len(self.param_groups)]
        self._check_plan(self.param_groups, params)
        self._claim = Claim(self)
        self._claim.add(params)

    @classmethod
    def _implicit(cls, named_params: Sequence[tuple[str, Parameter]], **keywords: Any) -> ZenFlowAdamW:
        """The optimizer of a model compiled with options and no optimizer object: steps at the end of each backward."""
        optimizer = cls.__new__(cls)
        optimizer._steps_in_backward = True
        cls.__init__(optimizer, named_params, **keywords)
        return optimizer

    @property
    def options(self) -> Options:
        """The options of this optimizer.

        Under ``policy="auto"`` with the policy and its ``ratio``, ``update_stride``, ``spare_device_bytes`` and
        ``offload_device`` decided, likewise ``update_stride="auto"``: reading them then is a first use. Groups that are
        added later are planned under the same choice.
        """
        return self.engine.options if self._engine is None and _left_open(self._options) else self._options

    @property
    def engine(self) -> Engine:
        """The runtime behind this optimizer, built now if this is the optimizer's first use.

        It is built again if the model was moved or cast since, and there has been no compilation and no gradient.

        Raises:
            RuntimeError: the optimizer is closed.
            ValueError: see :class:`ZenFlowAdamW`; the next use tries again.
        """
        engine = self._engine
        if engine is None or engine.closed or engine.outdated:
            with self._building:
                engine = self._built()
        return engine

    def _built(self) -> Engine:
        """The engine; made of the parameters as they are now, if there is none for them yet."""
        self._check_open()
        if self._engine is not None:
            if not self._engine.outdated:
                return self._engine
            self._engine.detach()
            self._engine.close(flush=False)
            self._engine = None
            ops.register_claim(self._claim)
        named = _named(self.param_groups)
        device = self._claim.params[0].device
        refuse_sharded(self._claim.params)  # they may have become shards since construction
        _check_devices(self._claim.params, device)
        options = _resolved(self._given, named, implicit=self._steps_in_backward)
        engine = Engine(self.param_groups, options, device, implicit=self._steps_in_backward)
        try:
            for first, stop in pairwise((0, *self._calls)):
                engine.add_params(named[first:stop], first)
            step_graph = fused_step_graph(engine.plan, engine.id)
        except BaseException:
            engine.close(flush=False)
            raise
        self._options = options
        self._step_graph: GraphModule = step_graph
        self._claim.listen()
        engine.attach(self._claim, _backward_ended)
        self._engine = engine
        ops.unregister_claim(self._claim)
        record_new_engine(engine)
        return engine

    @property
    def _is_closed(self) -> bool:
        return self._closed or (self._engine is not None and self._engine.closed)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this ZenFlowAdamW is closed; create a new one and compile the model again")

    def _check_plan(self, groups: Sequence[dict[str, Any]], params: Sequence[Parameter]) -> None:
        """Plan ``params`` as they are now, to raise at construction what needs no memory to know.

        Raises:
            ValueError: see ``existing_directory``, ``worker_cores`` and ``checked_plan``.
        """
        if self._options.nvme_path is not None and (self._options.in_files or self._options.policy == "auto"):
            existing_directory(self._options.nvme_path)
        if _left_open(self._options):
            return
        worker_cores(self._options)
        plan = empty_plan(self._options)
        named = _named(groups)
        for first, stop in pairwise((0, *self._calls)):
            new = [pair for group in named[first:stop] for pair in group]
            plan = checked_plan(plan, params[: len(plan.params) + len(new)], new, self._options)

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """For each parameter ``step``: f32[], the number of gradients it has taken, brought up to date by each read.

        The other entries are None: ``state_dict()`` makes them. Writing any of it is refused by the next ``step()``.
        """
        if not self._is_closed and not self._state_was_edited:  # else the next step says so
            self._show_steps()
        return self._states

    @state.setter
    def state(self, states: defaultdict[Tensor, dict[str, Any]]) -> None:
        if hasattr(self, "_states"):
            raise AttributeError(f"optimizer.state {_NOT_WRITABLE}")
        self._states = states
        self._steps_shown: list[tuple[Tensor, int]] = []

    def _show_steps(self) -> None:
        self._steps_shown[:] = checkpoint.show_steps(self.engine, self._states)  # a wrapper may share the list

    @property
    def _state_was_edited(self) -> bool:
        """Whether ``optimizer.state`` was cleared or written since it was shown; entries of other tensors may be added.

        Lightning replaces each entry by an equal one.
        """
        if not self._steps_shown:
            return False
        entries = [self._states.get(param) for param, _ in zip(self._claim.params, self._steps_shown, strict=False)]
        return any(entry is None or not checkpoint.is_as_shown(entry) for entry in entries) or any(
            step._version != version for step, version in self._steps_shown
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of optimizer state on the device, staging buffers included."""
        return self.engine.roster.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer state, gradient windows and upload buffers in host memory."""
        return self.engine.roster.host_bytes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Those that exist keep their state, phases and windows.

        Raises:
            ValueError, TypeError: as at construction; nothing has been changed then.
        """
        self._check_open()
        param_group = _materialized(param_group)
        check_group({**self.defaults, **param_group})
        params = [param[1] if isinstance(param, tuple) else param for param in param_group["params"]]
        for param in params:
            _check_param(param)
        if len({id(param) for param in params}) < len(params):
            raise ValueError("a parameter is in its group twice; model.parameters() has each one once")
        _check_names([*self.param_groups, param_group])
        if not hasattr(self, "_claim"):  # the base class's constructor adds the groups that it was given
            super().add_param_group(param_group)
            return
        _check_device_and_owner(params, self._claim.params[0].device)
        engine, claimed = None if self._engine is None else self.engine, len(self._claim.params)
        super().add_param_group(param_group)
        self._calls.append(len(self.param_groups))
        try:
            self._claim.add(params)
            if engine is None:
                self._check_plan(self.param_groups, self._claim.params)
            else:
                engine.add_params(_named(self.param_groups)[-1:], len(self.param_groups) - 1)
                self._step_graph = fused_step_graph(engine.plan, engine.id)
        except BaseException:
            self.param_groups.pop()
            self._calls.pop()
            self._claim.keep(claimed)
            raise

    @torch_private.outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of the backwards since the last step.

        Updates of selected columns run now; what closes on the host becomes visible at the parameter's next use.
        Without any gradient nothing happens, and the step does not count.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: a gradient was consumed by an earlier step (call ``zero_grad()`` after each), the model was
                changed since the first use, ``optimizer.state`` was cleared or written, a closed optimizer, or
                asynchronous work that failed (chained to the original error).
            ValueError, TypeError: a value in ``param_groups`` that no step can use, or parameters that FSDP or tensor
                parallelism shards. Nothing has been changed then.
        """
        self._check_open()
        if self._state_was_edited:
            raise RuntimeError(f"optimizer.state was cleared or written; it {_NOT_WRITABLE}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._claim.check_params(self.param_groups)
        if not self._stepped:
            refuse_replaced_by_shards([param for param in self._claim.params if param.grad is None])
            self._stepped = True
        if self._engine is None and all(param.grad is None for param in self._claim.params):
            return loss
        engine = self.engine
        engine.check_parameters()
        if not engine.has_gradients:
            return loss
        engine.begin_update()
        try:
            self._step_graph(*(engine.params[p] for p in engine.offloaded))
            engine.end_update()
        except BaseException as error:
            engine.failure = error
            raise
        return loss

    @torch_private.outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients, as ``model.zero_grad()`` and ``param.grad = None`` do.

        Args:
            set_to_none: False sets gradients to zero instead. A step uses zeros, as in PyTorch: moments and weights
                decay.
        """
        self._check_open()
        super().zero_grad(set_to_none)
        if self._engine is not None:
            self._engine.discard()

    def synchronize(self) -> None:
        """Wait for work in flight and make visible what is due, before weights are read outside of compiled graphs.

        The trajectory stays what it would have been.

        Raises:
            RuntimeError: work in flight failed.
        """
        self.engine.synchronize()

    @torch.no_grad()
    def flush(self) -> None:
        """Apply the gradients in open update windows and make every update visible. Training may go on afterwards.

        Call it before a model is saved that is not trained on with this state: with ``update_interval`` above 1, a
        model that is saved last holds every gradient only then. It is not needed for a checkpoint to resume from,
        since ``state_dict()`` holds the windows. A flush changes the trajectory: windows restart empty and keep their
        phases. Gradients in ``.grad`` that no step has used stay there. Weights that were written by hand or loaded
        since the last step stay as they are: the windows' gradients of these parameters are dropped, with a warning,
        unless ``synchronize()`` was called after the write.

        Raises:
            ValueError, TypeError: an eps in ``param_groups`` that no step can use. Nothing has been changed then.
            RuntimeError: a closed optimizer, work in flight that failed, or an earlier step that failed half-way; load
                a saved state then.
        """
        self._check_open()
        if self._engine is not None:
            self._engine.flush()

    def state_dict(self) -> dict[str, Any]:
        """Everything a bitwise resume needs, from the middle of a window too, readable with ``weights_only=True``.

        Like ``.grad``, gradients that no step has used yet are not part of it.

        Returns:
            ``state`` and ``param_groups``, as ``torch.optim.AdamW`` has them. ``state`` has tensors on the host alone,
            whose names, shapes and dtypes depend on the parameters and options: ``step``, ``exp_avg``, ``exp_avg_sq``
            and what else a resume needs.

        Raises:
            ValueError: parameters in ``param_groups`` were changed by hand.
            RuntimeError: work in flight failed, or the optimizer is closed.
        """
        engine = self.engine
        for hook in torch_private.optimizer_hooks(self, "state_dict_pre"):
            hook(self)
        self._claim.check_params(self.param_groups)
        engine.synchronize()
        state = checkpoint.state_dict(engine, self.param_groups)
        for hook in torch_private.optimizer_hooks(self, "state_dict_post"):
            state = _or_else(hook(self, state), state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken. Weights may be loaded before or after; gradients are discarded.

        Args:
            state_dict: of a ZenFlowAdamW with the same options, or of a ``torch.optim.AdamW``, whose update windows
                are empty. Parameters are matched by their order in the param groups, whatever they are called there.

        Raises:
            ValueError, TypeError: the state belongs to another model or plan, is not complete, has a value that no step
                can use, or is none; nothing has changed then. After anything else, such as a failure of memory or disk,
                no step runs until a state has been loaded.
        """
        engine = self.engine
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is a {type(state_dict).__name__}; give what state_dict() returned")
        state_dict = state_dict.copy()  # hooks may change it
        for hook in torch_private.optimizer_hooks(self, "load_state_dict_pre"):
            state_dict = _or_else(hook(self, state_dict), state_dict)
        self._claim.check_params(self.param_groups)
        checkpoint.load_state_dict(engine, self.param_groups, state_dict)
        self._states.clear()
        self._show_steps()
        for hook in torch_private.optimizer_hooks(self, "load_state_dict_post"):
            hook(self)

    def close(self) -> None:
        """End of training: apply the gradients that wait in open windows, land everything, free host memory."""
        self._close(flush=True)

    def _close(self, *, flush: bool) -> None:
        with self._building:
            self._closed = True
        if self._engine is not None:
            self._engine.close(flush=flush)
        else:
            self._claim.release()

    def __enter__(self) -> ZenFlowAdamW:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        with suppress(RuntimeError):  # what left the block is the error to see; this one follows from it, or is alike
            self._close(flush=False)

    def __del__(self) -> None:
        # What is due still lands; open windows are not flushed, since the moment of collection is not the user's.
        claim, engine = getattr(self, "_claim", None), getattr(self, "_engine", None)
        # A wrapper that shares our attributes (Lightning's) may be collected before us.
        if claim is None or (claim.optimizer is not None and claim.optimizer is not self):
            return
        if engine is None:
            claim.release()
        if engine is None or engine.closed or sys.is_finalizing():  # at exit, engines have closed before
            return
        with suppress(Exception):
            if engine.roster.runs(threading.current_thread()):  # the collector runs in any: none may wait for itself
                threading.Thread(target=engine.close, kwargs={"flush": False}, name="zenflow-close").start()
            else:
                engine.close(flush=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        Raises:
            TypeError: always. Threads and host memory cannot be copied, nor parameters owned by two optimizers.
        """
        raise TypeError(
            "a ZenFlowAdamW cannot be copied or pickled; save its state_dict(), and load it into a new one over the "
            "other model's parameters"
        )


def _backward_ended(optimizer: ZenFlowAdamW) -> None:
    """A backward is over: in the implicit form so is the step, if it was the last of those declared."""
    engine = optimizer.engine
    if not engine.implicit:
        return
    if engine.backwards >= (optimizer.options.gradient_accumulation_steps or 1) and engine.has_gradients:
        optimizer.step()
        optimizer.zero_grad()
    engine.show_consumed()


def _left_open(options: Options) -> bool:
    """Whether some of the options are left to the performance model."""
    return options.policy == "auto" or options.measures_stride


def _resolved(
    options: Options, named: Sequence[Sequence[tuple[str, Parameter]]], *, implicit: bool
) -> Options:
    """``options`` with what is left to the performance model decided, on this machine as it is now."""
    if not _left_open(options):
        return options
    from zenflow_compile.planning import auto  # its equations bring sympy, a third of a second to import

    pairs = [pair for group in named for pair in group]
    machine = measured_hardware(options, [param for _, param in pairs])
    specs = specs_of(pairs)
    if options.policy != "auto":
        return auto.resolve_stride(options, machine, weight_bytes=stride_weight_bytes(specs))
    assert options.tokens_per_step is not None
    return auto.choose(specs, options, machine, tokens=options.tokens_per_step, implicit=implicit)


def _named(groups: Sequence[dict[str, Any]]) -> list[list[tuple[str, Parameter]]]:
    """Parameters with names, by group; those without a name are called after their index in the optimizer."""
    named: list[list[tuple[str, Parameter]]] = []
    first = 0
    for group in groups:
        names = group.get("param_names") or [f"param{first + offset}" for offset in range(len(group["params"]))]
        named.append(list(zip(names, group["params"], strict=True)))
        first += len(names)
    return named


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
    if param.is_complex() or not param.is_floating_point():
        raise TypeError(
            f"a parameter has dtype {param.dtype}; only real floating-point parameters can be optimized: "
            "leave it out of the optimizer, or view a complex one as real"
        )
    if param.dtype not in _DTYPES:
        raise TypeError(
            f"a parameter has dtype {param.dtype}; only parameters of {', '.join(map(str, _DTYPES))} can be optimized: "
            "leave it out of the optimizer, or train weights of one of these and cast them in the forward"
        )
    if param.layout != torch.strided:
        raise TypeError(f"a parameter has layout {param.layout}; only dense (strided) parameters can be optimized")
    if param.device.type == "meta":
        raise ValueError(
            "a parameter is on the meta device; materialise the model before creating the optimizer, without a "
            'device_map (of device_map="auto", dispatch_model) that leaves some of its weights for later'
        )


def _check_device_and_owner(params: Sequence[Tensor], device: torch.device) -> None:
    _check_devices(params, device)
    if any(ops.is_owned(param) for param in params):
        raise ValueError(
            "a parameter already belongs to another ZenFlowAdamW; close() that one, or leave the parameter out"
        )


def _check_devices(params: Sequence[Tensor], device: torch.device) -> None:
    for param in params:
        if param.device != device:
            raise ValueError(
                f"a parameter is on {param.device} and the others are on {device}; move the model to one device first "
                '(without device_map="auto" or pipeline stages), or use one optimizer per device'
            )


@atexit.register
def _close_all() -> None:
    """What is due lands before the interpreter takes modules apart: operators that run then abort the process."""
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            with suppress(Exception):
                engine.close(flush=False)
