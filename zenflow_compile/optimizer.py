"""``ZenFlowAdamW``: AdamW whose state lives where a plan puts it, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from zenflow_compile import torch_private
from zenflow_compile.options import Options
from zenflow_compile.passes.pipeline import fused_step_graph
from zenflow_compile.planning.policies import stride_weight_bytes
from zenflow_compile.profiling.timeline import record_new_engine
from zenflow_compile.runtime import checkpoint, ops
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.measured_hardware import measured_hardware
from zenflow_compile.runtime.param_groups import check_group
from zenflow_compile.runtime.roster import specs_of
from zenflow_compile.unread_options import warn_of_unread

_NOT_WRITABLE = (
    "shows a state that lives elsewhere: clearing or replacing it changes nothing; create a new optimizer to start "
    "with new moments, or call load_state_dict()"
)


class ZenFlowAdamW(torch.optim.Optimizer):
    """AdamW with column-selected updates on the device and asynchronous updates of the rest on the host.

    Create it before ``torch.compile(model, backend="zenflow")`` sees its first batch; without ``torch.compile`` it
    works as well, with less overlap. Param groups, learning-rate schedulers, closures, hooks and ``state_dict`` are
    those of any PyTorch optimizer. ``.grad`` of an offloaded parameter is a tensor without memory of its own, which
    PyTorch's clipping, ``GradScaler`` and hooks see as any other. Its values are gone once ``step()`` has consumed it.

    Args:
        params: parameters, (name, parameter) pairs, or param groups. Names make reports readable.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; may differ between groups and change at any time.
        **options: where state lives and when it is updated; see :class:`~zenflow_compile.options.Options`
            (``policy``, ``topk_ratio``, ``update_interval``, ``select_interval``, ``overlap_step``, ...).

    Attributes:
        options: with what was left to the performance model decided: under ``policy="auto"`` the policy and its
            ``ratio``, ``update_stride``, ``spare_device_bytes`` and ``offload_device``. Groups that are added later are
            planned under the same choice.

    Raises:
        ValueError: a value out of range, parameters on different devices, a parameter that another live optimizer of
            this kind owns, more host memory needed than there is, or ``policy="auto"`` where nothing fits. Nothing has
            been changed then.
        TypeError: an unknown option, or a complex, integer or sparse parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        implicit = bool(options.pop("_implicit", False))
        self.options = Options.from_keywords(**options)
        warn_of_unread(self.options, stacklevel=2)
        self._engine: Engine | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            raise ValueError("params has groups but no parameter; give the optimizer the model's parameters")
        _check_device_and_owner(params, None)
        self.options = _resolved(self.options, _named(self.param_groups, 0), implicit=implicit)
        engine = Engine(self.param_groups, self.options, params[0].device, implicit=implicit)
        try:
            engine.add_params(_named(self.param_groups, 0))
        except BaseException:
            engine.close(flush=False)
            raise
        self._engine = engine
        engine.attach(self, _backward_ended)
        self._step_graph: GraphModule = fused_step_graph(engine.plan, engine.id)
        record_new_engine(engine)

    @classmethod
    def _implicit(cls, named_params: Sequence[tuple[str, Parameter]], **keywords: Any) -> ZenFlowAdamW:
        """The optimizer of a model compiled with options and no optimizer object: steps at the end of each backward."""
        return cls(named_params, _implicit=True, **keywords)

    @property
    def engine(self) -> Engine:
        """The runtime behind this optimizer.

        Raises:
            RuntimeError: the optimizer is closed.
        """
        if self._engine is None or self._engine.closed:
            raise RuntimeError("this ZenFlowAdamW is closed; create a new one and compile the model again")
        return self._engine

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """For each parameter ``step``: f32[], the number of gradients it has taken, brought up to date by each read.

        The other entries are None: ``state_dict()`` makes them.
        """
        engine = self._engine
        cleared = len(self._states) < self._states_shown  # the next step says so
        if not cleared and (engine is None or not engine.closed):
            self._show_steps()
        return self._states

    @state.setter
    def state(self, states: defaultdict[Tensor, dict[str, Any]]) -> None:
        if hasattr(self, "_states"):
            raise AttributeError(f"optimizer.state {_NOT_WRITABLE}")
        self._states = states
        self._states_shown = 0

    def _show_steps(self) -> None:
        checkpoint.show_steps(self.engine, self._states)
        self._states_shown = len(self._states)

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
        engine = None if self._engine is None else self.engine
        param_group = _materialized(param_group)
        check_group({**self.defaults, **param_group})
        params = [param[1] if isinstance(param, tuple) else param for param in param_group["params"]]
        for param in params:
            _check_param(param)
        if len({id(param) for param in params}) < len(params):
            raise ValueError("a parameter is in its group twice; model.parameters() has each one once")
        if engine is not None:
            _check_device_and_owner(params, engine)
        super().add_param_group(param_group)
        if engine is not None:
            try:
                engine.add_params(_named(self.param_groups[-1:], len(engine.params)), len(self.param_groups) - 1)
            except BaseException:
                self.param_groups.pop()
                raise
            self._step_graph = fused_step_graph(engine.plan, engine.id)

    @torch_private.outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of the backwards since the last step.

        Updates of selected columns run now; what closes on the host becomes visible at the parameter's next use.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: no parameter has a gradient, a gradient was consumed by an earlier step (call ``zero_grad()``
                after each), a closed optimizer, ``optimizer.state`` was cleared, or asynchronous work that failed
                (chained to the original error).
        """
        engine = self.engine
        if len(self._states) < self._states_shown:
            raise RuntimeError(f"optimizer.state was cleared; it {_NOT_WRITABLE}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not engine.has_gradients:
            raise RuntimeError(
                ".step() without a backward: no parameter of this optimizer has a gradient; call loss.backward() "
                "first, and check that the compiled model has the optimizer's parameters"
            )
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
        engine = self.engine
        super().zero_grad(set_to_none)
        engine.discard()

    def synchronize(self) -> None:
        """Wait for work in flight and make visible what is due, before weights are read outside of compiled graphs.

        The trajectory stays what it would have been.

        Raises:
            RuntimeError: work in flight failed.
        """
        self.engine.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Everything a bitwise resume needs, from the middle of a window too, readable with ``weights_only=True``.

        Like ``.grad``, gradients that no step has used yet are not part of it.

        Returns:
            ``state`` and ``param_groups``, as ``torch.optim.AdamW`` has them. ``state`` has tensors on the host alone,
            whose names, shapes and dtypes depend on the parameters and options: ``step``, ``exp_avg``, ``exp_avg_sq``
            and what else a resume needs.
        """
        engine = self.engine
        for hook in torch_private.optimizer_hooks(self, "state_dict_pre"):
            hook(self)
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
        checkpoint.load_state_dict(engine, self.param_groups, state_dict)
        self._states.clear()
        self._show_steps()
        for hook in torch_private.optimizer_hooks(self, "load_state_dict_post"):
            hook(self)

    def close(self) -> None:
        """End of training: apply the gradients that wait in open windows, land everything, free host memory."""
        if self._engine is not None:
            self._engine.close(flush=True)

    def __enter__(self) -> ZenFlowAdamW:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._engine is None:
            return
        if exception[0] is None:
            self.close()
            return
        with suppress(RuntimeError):  # what left the block is the error to see; this one follows from it, or is alike
            self._engine.close(flush=False)

    def __del__(self) -> None:
        # What is due still lands; open windows are not flushed, since the moment of collection is not the user's.
        engine = getattr(self, "_engine", None)
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


def _resolved(
    options: Options, named: Sequence[Sequence[tuple[str, Parameter]]], *, implicit: bool
) -> Options:
    """``options`` with what is left to the performance model decided, on this machine as it is now."""
    if options.policy != "auto" and not options.measures_stride:
        return options
    from zenflow_compile.planning import auto  # its equations bring sympy, a third of a second to import

    pairs = [pair for group in named for pair in group]
    machine = measured_hardware(options, [param for _, param in pairs])
    specs = specs_of(pairs)
    if options.policy != "auto":
        return auto.resolve_stride(options, machine, weight_bytes=stride_weight_bytes(specs))
    assert options.tokens_per_step is not None
    return auto.choose(specs, options, machine, tokens=options.tokens_per_step, implicit=implicit)


def _named(groups: Sequence[dict[str, Any]], first: int) -> list[list[tuple[str, Parameter]]]:
    """Parameters with names, by group; those without a name are called after their index, counted from ``first``."""
    named: list[list[tuple[str, Parameter]]] = []
    for group in groups:
        names = group.get("param_names") or [f"param{first + offset}" for offset in range(len(group["params"]))]
        named.append(list(zip(names, group["params"], strict=True)))
        first += len(names)
    return named


def _or_else(changed: dict[str, Any] | None, state: dict[str, Any]) -> dict[str, Any]:
    return state if changed is None else changed


def _materialized(group: dict[str, Any]) -> dict[str, Any]:
    params = group["params"]
    if isinstance(params, set):  # its order would change between runs, and a resume would mix parameters up
        raise TypeError("params is a set, which has no order; give a list of parameters")
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _check_param(param: Any) -> None:
    if not isinstance(param, Tensor):
        raise TypeError(f"params has a {type(param).__name__}; give tensors, (name, tensor) pairs, or groups of them")
    if torch_private.is_wrapper_subclass(param):
        raise TypeError(
            f"a parameter is a {type(param).__name__}; sharded and wrapped parameters are not supported in this "
            "version: create the optimizer over plain tensors, in one process"
        )
    if param.is_complex() or not param.is_floating_point():
        raise TypeError(
            f"a parameter has dtype {param.dtype}; only real floating-point parameters can be optimized: "
            "leave it out of the optimizer, or view a complex one as real"
        )
    if param.layout != torch.strided:
        raise TypeError(f"a parameter has layout {param.layout}; only dense (strided) parameters can be optimized")
    if param.device.type == "meta":
        raise ValueError("a parameter is on the meta device; materialise the model before creating the optimizer")


def _check_device_and_owner(params: Sequence[Tensor], engine: Engine | None) -> None:
    device = params[0].device if engine is None else engine.device
    for param in params:
        if param.device != device:
            raise ValueError(
                f"a parameter is on {param.device} and its peers on {device}; move the model to one device first, "
                "or use one optimizer per device"
            )
        if ops.owner_of(param) is not None:
            raise ValueError(
                "a parameter already belongs to another ZenFlowAdamW; close() that one, or leave the parameter out"
            )


@atexit.register
def _close_all() -> None:
    """What is due lands before the interpreter takes modules apart: operators that run then abort the process."""
    for engine in ops.live_engines():
        if isinstance(engine, Engine):
            with suppress(Exception):
                engine.close(flush=False)
