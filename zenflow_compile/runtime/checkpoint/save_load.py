"""Saves an engine's state as tensors under torch.optim.AdamW's two keys, and loads it.

Moments and masters are stored dense, in the parameter's shape, for selected and deferred slices. Selection, score,
update window and schedule are stored with them, so that a resume is bitwise; see ``checkpoint.format.layout``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.checkpoint.format import (
    NONE,
    array_names,
    chosen_entry,
    in_shape,
    in_slices,
    layout,
    per_slice,
    plan_entry,
    saved_coefficients,
    state_dtype,
    window_places,
)
from zenflow_compile.runtime.checkpoint.shares import own_entry, sharded_entry, whole_entry
from zenflow_compile.runtime.checkpoint.validation import Checked, check_state
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState
from zenflow_compile.runtime.device_updates.selection import Selection
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.forked_engine import ForkedEngine
from zenflow_compile.runtime.host.host_kernel import scales_and_values
from zenflow_compile.runtime.host.workers import Job
from zenflow_compile.runtime.parameters.host_state import FlushedWindow, GradientBuffer
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.runtime.state_forms import State, StateRows
from zenflow_compile.runtime.update_rule import StepCoefficients

TO_CHANGE_STATE = (
    "to read or change it, as a reset of the moments does: state = optimizer.state_dict(), change the tensors in "
    "state['state'], optimizer.load_state_dict(state)"
)


class InStateDict:
    """Stands for a tensor that is divided between device, host memory and files. Its use raises, and says what to do.

    ``optimizer.state`` needs something under each name: tools for distributed checkpoints read the names there.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "<in state_dict()>"

    def __getattr__(self, name: str) -> NoReturn:
        # Python and tools ask any object for special names, to find out what it is.
        raise AttributeError(
            name if name.startswith("__") else f".{name} of a state that lives elsewhere; {TO_CHANGE_STATE}"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(f"{function.__name__} of an optimizer state that lives elsewhere; {TO_CHANGE_STATE}")

    def _refuse(self, *operands: Any) -> NoReturn:
        raise TypeError(f"an operation on an optimizer state that lives elsewhere; {TO_CHANGE_STATE}")

    __getitem__ = __setitem__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _refuse
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = _refuse


def state_dict(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a synchronized engine: ``state`` and ``param_groups``, as PyTorch has them."""
    if isinstance(engine, ForkedEngine):
        errors.refuse_in_child()
    engine.calls.begin_save()
    with torch.device("cpu"):  # whatever the default device is
        entries = {plan.index: _entries(engine, plan.index) for plan in engine.plan.params if plan.trained}
    return {"state": entries, "param_groups": _saved_groups(engine, groups)}


def _saved_groups(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``param_groups`` with the numbers of parameters in place of these."""
    index_of = {id(param): index for index, param in enumerate(engine.registry.given)}
    with torch.device("cpu"):
        return [
            {
                **{key: _own(value) for key, value in group.items() if key != "params"},
                "params": [index_of[id(param)] for param in group["params"]],
            }
            for group in groups
        ]


def begin_again(engine: Engine, groups: Sequence[dict[str, Any]]) -> None:
    """Have the state of an optimizer that has not stepped, as PyTorch's have once their ``state`` is empty.

    Gradients in update windows are applied before. Raises: see ``load_state_dict``.
    """
    engine.flush()
    load_state_dict(engine, groups, {"state": {}, "param_groups": _saved_groups(engine, groups)})


def load_state_dict(engine: Engine, groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Load a state of the same plan into an engine, or a state of PyTorch's optimizer into any engine.

    Raises:
        ValueError: the state is damaged, not complete, or of another model or plan, on this rank or on another one;
            nothing has been changed then. After any other error, such as one of memory or disk, the engine has failed.
    """
    with torch.device("cpu"):  # whatever the default device is
        # All ranks load it, or none of them does.
        try:
            _refuse_unused_gradients(engine)
            checked = check_state(engine, groups, state)
            _refuse_filled_in(engine, checked)
        except Exception as error:
            engine.calls.agree_on_load(str(error) or type(error).__name__)
            raise
        engine.calls.agree_on_load("")
        try:
            engine.abandon()
            _load(engine, groups, checked)
        except BaseException as error:
            engine.core.failure = error
            raise
    if checked.converted:
        warnings.warn(
            f"the state of {len(checked.converted)} parameters was saved with other options, and was converted: "
            f"gradients in {len(checked.weights)} update windows were applied, as flush() does",
            UserWarning,
            stacklevel=user_stacklevel(),
        )


def _refuse_unused_gradients(engine: Engine) -> None:
    """Raise ValueError if ranks have sent each other gradients that are still to be used."""
    if engine.calls.divides and engine.unused_gradients:
        raise ValueError(
            f"load_state_dict() between backward() and step(): the gradients of {engine.backward.count} backwards, of "
            "which other ranks have parts, would be lost; call step() or optimizer.zero_grad() first"
        )


def _refuse_filled_in(engine: Engine, checked: Checked) -> None:
    """Raise ValueError if PyTorch has put arrays of its own optimizer into the state of an optimizer in use.

    The rest of the state is still that of this moment, and says how many gradients each parameter has taken.
    """
    if not engine.step or checked.step != engine.step or engine.core.failure is not None or not engine.offloaded:
        return
    if all(_has_other_moments(each, _own_entry(engine, index, checked)) for index, each in engine.offloaded.items()):
        index, first = next(iter(engine.offloaded.items()))
        raise ValueError(
            f"the state dict has step={int(checked.entries[index]['step'])} for {first.plan.name!r}, which has taken "
            f"{_gradients_taken(first)} gradients, and else this optimizer's own state, as when dcp.load reads the "
            "state of PyTorch's optimizer into it: load that before the first step, or by optimizer.load_state_dict()"
        )


def _has_other_moments(offloaded: OffloadedParam, entry: Mapping[str, Any] | None) -> bool:
    """Whether ``entry`` has this moment's masters, and moments that do not belong to them.

    After as many steps the weight tells, if it was loaded before: with moments that were scaled it is the masters'.
    """
    plan = offloaded.plan
    # Hazard: a file may be damaged, and the load is the way out.
    if entry is None or "master" not in entry or int(entry["step"]) == 0 or plan.in_file or plan.weight_in_file:
        return False
    if int(entry["step"]) != _gradients_taken(offloaded):
        return torch.equal(entry["master"].cpu(), dense_state(offloaded)["master"])
    masters = entry["master"].cpu().to(plan.dtype)
    if plan.staleness or torch.equal(offloaded.weights.values.cpu().flatten(), masters.flatten()):
        return False  # late updates show another weight
    state = dense_state(offloaded)
    return torch.equal(entry["master"].cpu(), state["master"]) and not all(
        torch.equal(entry[name].cpu(), state[name]) for name in array_names(plan)
    )


class ShownStep(NamedTuple):
    """What ``optimizer.state`` has of a parameter: ``step``, and its version, which changes with every write to it."""

    param: Tensor
    step: Tensor
    version: int


def show_steps(engine: Engine, states: MutableMapping[Tensor, dict[str, Any]]) -> list[ShownStep]:
    """Update ``optimizer.state``: ``step`` of each parameter, and ``InStateDict`` for the other entries.

    All names are there, since ``torch.distributed.checkpoint.state_dict`` reads the names of flattened states here.
    Hazard: for an empty ``optimizer.state`` it takes an optimizer step to fill it. Entries are brought up to date where
    ``state`` is read, so that training does not pay for them.
    """
    shown = []
    for index, param in enumerate(engine.registry.given):
        if not engine.plan.params[index].trained:
            continue
        entry = states[param]
        for name in layout(engine.plan.params[index], adaptive=engine.plan.adaptive):
            entry.setdefault(name, InStateDict())
        if not isinstance(entry["step"], Tensor):
            entry["step"] = _step(0)
        if index in engine.offloaded:
            entry["step"].fill_(_gradients_taken(engine.offloaded[index]))
        elif (state := engine.registry.device_updated.state(index)) is not None:
            entry["step"].fill_(state.step)
        else:
            entry["step"].zero_()
        shown.append(ShownStep(param, entry["step"], entry["step"]._version))
    return shown


def is_as_shown(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of ``optimizer.state`` still has ``step``, and no other values."""
    return [name for name, value in entry.items() if not isinstance(value, InStateDict)] == ["step"]


def dense_state(offloaded: OffloadedParam) -> dict[str, Tensor]:
    """Master and arrays of all slices, in the parameter's shape; no job may be writing them."""
    selection, device, read = _selection(offloaded), offloaded.device, offloaded.transport.device_memory.read
    # On the host: the device may have no room for fp32 moments.
    on_device_side = StateRows(device.form, State(read(each).cpu() for each in device.state)).read()
    with offloaded.host.acquire() as state:
        on_host_side = state.read()
        return {
            name: in_shape(
                offloaded.plan, [(selection.selected, on_device), (selection.deferred, on_host)], torch.float32
            )
            for name, on_device, on_host in zip(_state_names(offloaded.plan), on_device_side, on_host_side, strict=True)
        }


def _state_names(plan: ParamPlan) -> tuple[str, ...]:
    return "master", *array_names(plan)


def _entries(engine: Engine, index: int) -> dict[str, Tensor]:
    plan, adaptive = engine.plan.params[index], engine.plan.adaptive
    found = _offloaded_state(engine, engine.offloaded[index]) if plan.offloaded else _whole_entries(engine, index)
    found["plan"], found["chosen"] = plan_entry(plan.whole), chosen_entry(engine.options)
    found["optimizer_step"] = torch.tensor(engine.step)
    if adaptive:
        found["shortest_window"] = torch.tensor(_or_none(engine.schedule.shortest_window))
    entry = {name: found[name] for name in layout(plan, adaptive=adaptive)}
    if isinstance(param := engine.params[index], LocalShard):
        return sharded_entry(plan, param, entry)
    return entry if plan is plan.whole or engine.ranks is None else whole_entry(plan, entry, engine.ranks.group)


def _load(engine: Engine, groups: Sequence[dict[str, Any]], checked: Checked) -> None:
    for group, values in zip(groups, checked.groups, strict=True):
        group.update({key: _own(value) for key, value in values.items()})
    engine.core.step = checked.step
    engine.core.used = engine.core.used or checked.step > 0
    engine.recorder.step = engine.step
    engine.schedule.continue_with(checked.shortest_window)
    for index, weight in checked.weights.items():
        engine.access.write_weight(index, weight)  # of a flushed window; compared with the masters at the first use
    for index in range(len(engine.params)):
        entry, plan = _own_entry(engine, index, checked), engine.plan.params[index]
        if index in engine.offloaded:
            offloaded = engine.offloaded[index]
            if (home := offloaded.weights.home) is not None:
                home.values.detach_from_state(on_device=home.loaded)
            full = {**_untrained(offloaded), **(entry or {})}
            if "master" not in full:
                weights = offloaded.weights
                full["master"] = weights.values.view(plan.shape) if plan.share is None else weights.matrix
            _load_offloaded(engine, offloaded, full, flushed_at_load=index in checked.weights)
        else:
            engine.registry.device_updated.load(index, _whole_state(engine, index, entry))


def _own_entry(engine: Engine, index: int, checked: Checked) -> Mapping[str, Any] | None:
    """The entries of what this rank has of a parameter; None without any."""
    entry, plan = checked.entries.get(index), engine.plan.params[index]
    if entry is None or plan.shard is not None or plan is plan.whole:  # of a shard, it is local already
        return entry
    return own_entry(plan, entry)


def _own(value: Any) -> Any:
    """A copy of a group's value: schedulers write into learning rates that are tensors."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _or_none(value: float | None) -> float:
    return NONE if value is None else value


# Parameters that are updated on the device.


def _flat_weight(engine: Engine, index: int) -> Tensor:
    plan, weight = engine.plan.params[index], engine.registry.weight_of(index)
    return weight if plan.flat is None else plan.flat.part_of(weight)


def _step(gradients: int) -> Tensor:
    """A number of gradients as entries have it, whatever the default dtype and device are."""
    return torch.tensor(float(gradients), dtype=torch.float32, device="cpu")


def _whole_entries(engine: Engine, index: int) -> dict[str, Tensor]:
    """The entries of a parameter that is updated on the device; without a gradient yet, zeros and its weight."""
    plan, param = engine.plan.params[index], _flat_weight(engine, index)
    state = engine.registry.device_updated.state(index)
    if state is None:
        dtype = state_dtype(plan)
        zeros = {name: torch.zeros_like(param, dtype=dtype, device="cpu") for name in array_names(plan)}
        return {"step": _step(0), **zeros, "master": param.to(device="cpu", dtype=dtype, copy=True)}
    read = engine.device_memory.read
    arrays = state.form.expand(*(read(each).cpu() for each in state.arrays))
    found = dict(zip(array_names(plan), arrays, strict=True))
    if state.master is not None:
        found["master"] = read(state.master)
    of_arrays = {name: tensor.view(param.shape).to("cpu", copy=True) for name, tensor in found.items()}
    return {"step": _step(state.step), **of_arrays}


def _whole_state(engine: Engine, index: int, entry: Mapping[str, Any] | None) -> ResidentState | None:
    """The state to load; None for a parameter that has had no gradient."""
    plan = engine.plan.params[index]
    if entry is None or float(entry["step"]) == 0.0:
        return None
    master = None
    if plan.dtype != state_dtype(plan):
        master = entry["master"] if "master" in entry else _flat_weight(engine, index).to(state_dtype(plan))
    return ResidentState([entry[name] for name in array_names(plan)], int(entry["step"]), master)


# Offloaded parameters: saving.


def _selection(offloaded: OffloadedParam) -> Selection:
    """The selection to read, in host memory where the device's memory is given back."""
    return Selection(*map(offloaded.transport.device_memory.read, offloaded.device.selection.tensors()))


def _gradients_taken(offloaded: OffloadedParam) -> int:
    """Steps that had a gradient of this parameter, those in its update window included."""
    if offloaded.plan.k:
        return offloaded.device.steps
    return offloaded.host.taken + len(_coefficients(offloaded))


def _offloaded_state(engine: Engine, offloaded: OffloadedParam) -> dict[str, Tensor]:
    host, device, plan = offloaded.host, offloaded.device, offloaded.plan
    selection, read = _selection(offloaded), engine.device_memory.read
    found = dense_state(offloaded)
    found["step"] = _step(_gradients_taken(offloaded))
    found["score"] = read(device.score).to("cpu", copy=True).unsqueeze(1)
    found["mask"] = per_slice(plan, selection.selected, torch.ones(plan.k, dtype=torch.bool))
    found["selected_at"] = torch.tensor(_or_none(device.selected_at))
    found["selecting_ranks"] = torch.tensor(plan.selecting_ranks)
    schedule = [_or_none(value) for value in engine.schedule.state(plan.index)]
    found["schedule"] = torch.tensor(schedule, dtype=torch.float64)
    if window_places(plan):
        found.update(_window_entries(offloaded))
    if (residual := offloaded.parts.residual) is not None:
        found["residual"] = in_shape(plan, [(selection.deferred, read(residual.lost))], residual.lost.dtype)
    if plan.staleness and plan.deferred:
        waiting = [window.visible_at for window in host.flushed]
        found["visible_at"] = torch.tensor(waiting + [NONE] * (plan.staleness - len(waiting)))
        shown = [(selection.deferred, offloaded.weights.shown(selection))] if waiting else []
        found["shown"] = in_shape(plan, shown, plan.dtype)
    return found


def _window_entries(offloaded: OffloadedParam) -> dict[str, Tensor]:
    """The gradients in the update window, oldest first, and zeros in its empty places."""
    host, plan, deferred = offloaded.host, offloaded.plan, _selection(offloaded).deferred
    # A factor may still be on its way to the host: ``float`` waits for it.
    per_gradient = [[*each.options, float(each.grad_scale)] for each in _coefficients(offloaded)]
    empty = [0.0] * (len(plan.rule.options._fields) + 1)
    coefficients = torch.tensor(
        [*per_gradient, *([empty] * (window_places(plan) - len(per_gradient)))], dtype=torch.float64
    )
    found = {"open": torch.tensor(len(per_gradient)), "coefficients": coefficients}
    if (window_sum := offloaded.parts.window_sum) is not None:
        summed = [(deferred, offloaded.transport.device_memory.read(window_sum.total))] if per_gradient else []
        found["window_sum"] = in_shape(plan, summed, torch.float32)
        return found
    for place in range(window_places(plan)):
        gradient = host.gradients[host.open[place].index] if place < len(per_gradient) else None
        if plan.compressed:
            scales, values = (None, None) if gradient is None else scales_and_values(gradient)
            found[f"scale{place}"] = per_slice(plan, deferred, torch.zeros(plan.deferred) if scales is None else scales)
            found[f"window{place}"] = in_shape(plan, [] if values is None else [(deferred, values)], torch.int8)
        else:
            found[f"window{place}"] = in_shape(plan, [] if gradient is None else [(deferred, gradient)], plan.dtype)
    return found


def _coefficients(offloaded: OffloadedParam) -> list[StepCoefficients]:
    """The coefficients of each gradient in the update window, oldest first."""
    window_sum = offloaded.parts.window_sum
    return [buffer.coefficients for buffer in offloaded.host.open] if window_sum is None else window_sum.coefficients


# Offloaded parameters: loading.


def _untrained(offloaded: OffloadedParam) -> dict[str, Any]:
    """The entries of a parameter without a gradient yet. A state of PyTorch's optimizer replaces moments and ``step``.

    Nothing has been selected, and the update window is empty.
    """
    plan, zeros = offloaded.plan, torch.zeros(()).expand(offloaded.plan.shape)
    return {
        "step": 0.0,
        **dict.fromkeys(array_names(plan), zeros),
        "score": torch.zeros(plan.slices if plan.selects else 0),
        "mask": torch.arange(plan.slices) < plan.k,
        "selected_at": NONE,
        "open": 0,
        "residual": zeros,
        "visible_at": torch.tensor(()),
    }


def _load_offloaded(
    engine: Engine, offloaded: OffloadedParam, entry: Mapping[str, Any], *, flushed_at_load: bool
) -> None:
    """Load ``entry``: all entries of the layout, or only those of ``_untrained``.

    ``flushed_at_load``: its update window was not empty, and was flushed into the weight.
    """
    host, device, plan = offloaded.host, offloaded.device, offloaded.plan
    selected = torch.nonzero(entry["mask"].cpu().flatten()).flatten()
    device.selection = Selection.of(selected.to(torch.int32), plan.slices, engine.device)
    on_device_side, on_host_side = device.selection.selected.cpu().long(), device.selection.deferred.cpu().long()
    flushed = [at for at in entry["visible_at"].tolist() if at != NONE]
    uploads = [host.upload_to_load() for _ in flushed]
    with host.acquire(write=True, fresh=True) as host_state:
        slices = [in_slices(plan, entry[name].cpu()) for name in _state_names(plan)]
        master, *moments = (each[on_device_side].float() for each in slices)
        for target, source in zip(device.rows.stored, (master, *device.form.compress(*moments)), strict=True):
            target.copy_(source)
        of_host = [each[on_host_side].float() for each in slices]
        host_state.write(of_host)
        for upload in uploads:
            with upload.acquire(write=True, fresh=True) as weights:  # of another memory than the state
                weights.copy_(of_host[0])
    device.score.copy_(entry["score"].flatten())
    selected_at, count = int(entry["selected_at"]), int(entry["open"])
    device.selected_at = None if selected_at == NONE else selected_at
    device.steps = int(entry["step"]) if plan.k else 0
    host.taken = int(entry["step"]) - count if plan.deferred else 0
    _load_window(offloaded, entry, on_host_side, count, engine.step)
    if (residual := offloaded.parts.residual) is not None:
        residual.lost.copy_(in_slices(plan, entry["residual"].cpu())[on_host_side])
    for visible_at, upload in zip(flushed, uploads, strict=True):
        job = Job.ended(step=engine.step, param=plan.name)
        host.flushed.append(FlushedWindow(job=job, upload=upload, flushed_at=engine.step - 1, visible_at=visible_at))
    if "schedule" in entry:
        schedule = [None if value == NONE else value for value in entry["schedule"].tolist()]
        engine.schedule.restore(plan.index, schedule)
    shown = in_slices(plan, entry["shown"].cpu())[on_host_side] if flushed else None
    offloaded.weights.expect(shown, flushed_at_load=flushed_at_load)


def _load_window(
    offloaded: OffloadedParam, entry: Mapping[str, Any], deferred: Tensor, count: int, next_step: int
) -> None:
    """Load the first ``count`` gradients [deferred, length] of the update window, or their sum."""
    host, plan, window_sum = offloaded.host, offloaded.plan, offloaded.parts.window_sum
    loaded = saved_coefficients(plan, entry)
    if window_sum is not None:
        window_sum.coefficients = loaded
        if loaded:
            window_sum.total.copy_(in_slices(plan, entry["window_sum"].cpu())[deferred])
        return
    for place, coefficients in enumerate(loaded):
        # The state does not tell which steps had a gradient. As many steps ago the window was open in any case.
        index, buffer = host.free_buffer(next_step - count + place)
        gradient = in_slices(plan, entry[f"window{place}"].cpu())[deferred]
        if plan.compressed:
            scales, values = scales_and_values(buffer)
            scales.copy_(entry[f"scale{place}"].cpu().flatten()[deferred])
            values.copy_(gradient)
        else:
            buffer.copy_(gradient)
        host.open.append(GradientBuffer(index, coefficients, ThreadTicket.ended()))
