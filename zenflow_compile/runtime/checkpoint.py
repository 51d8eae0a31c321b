"""An engine's state as plain tensors and numbers, and back.

Moments and masters are stored dense, in the parameter's own shape, whatever side a line was on. What makes a resume
bitwise (selection, score, open window, schedule) is stored beside them in the order of the host's lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import device_ops, entry
from zenflow_compile.runtime.adam import SlotCoefficients
from zenflow_compile.runtime.checkpoint_check import CHOSEN, FORMAT, check_state, described
from zenflow_compile.runtime.compression import Residual
from zenflow_compile.runtime.copies import ThreadTicket
from zenflow_compile.runtime.device_adam import ResidentState
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.offloaded import OffloadedParam
from zenflow_compile.runtime.window_sum import WindowSum
from zenflow_compile.runtime.windows import Close, Slot
from zenflow_compile.runtime.workers import Job

_STATE = ("master", "exp_avg", "exp_avg_sq")


def state_dict(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a synchronized engine: ``state`` and ``param_groups`` as PyTorch has them, and ``zenflow``."""
    if engine.in_child:
        entry.refuse_in_child()
    state: dict[int, dict[str, Any]] = {}
    for index in range(len(engine.params)):
        if index in engine.offloaded:
            state[index] = _offloaded_state(engine, engine.offloaded[index])
        elif (resident := engine.roster.whole_state(index)) is not None:
            state[index] = {
                "step": float(resident.step),
                "exp_avg": resident.exp_avg.cpu().clone(),
                "exp_avg_sq": resident.exp_avg_sq.cpu().clone(),
                "master": None if resident.master is None else resident.master.cpu().clone(),
            }
    index_of = {id(param): index for index, param in enumerate(engine.params)}
    return {
        "state": state,
        "param_groups": [
            {
                **{key: _own(value) for key, value in group.items() if key != "params"},
                "params": [index_of[id(param)] for param in group["params"] if id(param) in index_of],
            }
            for group in groups
        ],
        "zenflow": {
            "format": FORMAT,
            **{name: getattr(engine.options, name) for name in CHOSEN},
            "step": engine.step,
            "shortest_window": engine.schedule.shortest_window if engine.adaptive_windows else None,
            "params": [described(param) for param in engine.plan.params],
        },
    }


def load_state_dict(engine: Engine, groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Put a state back into an engine of the same plan.

    Raises:
        ValueError: the state is not of this kind, not complete, or of another model or plan; nothing has been changed
            then. Whatever is raised later, such as a failure of memory or disk, leaves an engine that has failed.
    """
    check_state(engine, groups, state)
    try:
        engine.abandon()
        _load(engine, groups, state)
    except BaseException as error:
        engine.failure = error
        raise


def _load(engine: Engine, groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    for group, saved in zip(groups, state["param_groups"], strict=True):
        group.update({key: _own(value) for key, value in saved.items() if key not in ("params", "param_names")})
    engine.step = int(state["zenflow"]["step"])
    engine.recorder.step = engine.step
    engine.schedule.continue_with(state["zenflow"]["shortest_window"])
    for index in range(len(engine.params)):
        saved = state["state"].get(index)
        if index in engine.offloaded:
            _load_offloaded(engine, engine.offloaded[index], saved)
        else:
            engine.roster.load_whole(index, None if saved is None else _whole_state(saved))


def _whole_state(saved: Mapping[str, Any]) -> ResidentState:
    step = torch.tensor(saved["step"], dtype=torch.float32)
    return ResidentState(saved["exp_avg"], saved["exp_avg_sq"], step, saved["master"])


def _own(value: Any) -> Any:
    """A group's value of its own: schedulers write into learning rates that are tensors."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _offloaded_state(engine: Engine, offloaded: OffloadedParam) -> dict[str, Any]:
    host, device, plan = offloaded.host, offloaded.device, offloaded.plan
    selection = device.selection
    with host.borrowed() as on_host_side:
        sides = zip(_STATE, device.state(), on_host_side, strict=True)
        dense = {name: _dense(plan, selection, on_device, on_host) for name, on_device, on_host in sides}
    return {
        "step": device.steps if plan.k else host.taken,
        **dense,
        "selected": selection.selected.cpu().clone(),
        "rest": selection.rest.cpu().clone(),
        "score": device.score.cpu().clone(),
        "selected_at": device.selected_at,
        "taken": host.taken,
        **_open_window(offloaded),
        "residual": None if (residual := _residual(offloaded)) is None else residual.lost.to("cpu", copy=True),
        "visible_at": [close.visible_at for close in host.closes],
        "shown": offloaded.weights.shown(selection) if host.closes else None,
        "accumulates": offloaded.accumulates,
        "eager": offloaded.eager,
        "single": offloaded.single,
        "schedule": engine.schedule.state(plan.index),
    }


def _open_window(offloaded: OffloadedParam) -> dict[str, Any]:
    """The gradients that wait, one for each of the coefficients; where they are summed, the sum alone."""
    host, window_sum = offloaded.host, _window_sum(offloaded)
    if window_sum is None:
        window, slots = [host.gradients[slot.index].clone() for slot in host.open], [s.coefficients for s in host.open]
    else:
        window, slots = [window_sum.total.to("cpu", copy=True)] if window_sum.slots else [], window_sum.slots
    return {"window": window, "coefficients": [list(slot) for slot in slots]}


def _window_sum(offloaded: OffloadedParam) -> WindowSum | None:
    return None if offloaded.held is None else offloaded.held.window_sum


def _residual(offloaded: OffloadedParam) -> Residual | None:
    return None if offloaded.held is None else offloaded.held.residual


def _load_window(offloaded: OffloadedParam, saved: Mapping[str, Any]) -> None:
    host, window_sum = offloaded.host, _window_sum(offloaded)
    slots = [SlotCoefficients(*coefficients) for coefficients in saved["coefficients"]]
    if window_sum is not None:
        window_sum.slots = slots
        for total in saved["window"]:
            window_sum.total.copy_(total)
        return
    for gradient, coefficients in zip(saved["window"], slots, strict=True):
        index, slot = host.free_slot()
        slot.copy_(gradient)
        copied = ThreadTicket()
        copied.finish()
        host.commit(Slot(index, coefficients, copied))


def _dense(plan: ParamPlan, selection: device_ops.Selection, on_device: Tensor, on_host: Tensor) -> Tensor:
    lines = torch.empty((plan.lines, plan.length), dtype=torch.float32)
    lines[selection.selected.cpu().long()] = on_device.cpu()
    lines[selection.rest.cpu().long()] = on_host
    return (lines if plan.dim == 0 else lines.t()).reshape(plan.shape).contiguous()


def _load_offloaded(engine: Engine, offloaded: OffloadedParam, saved: Mapping[str, Any]) -> None:
    host, device, plan = offloaded.host, offloaded.device, offloaded.plan
    selected, rest = saved["selected"].clone(), saved["rest"].clone()
    selection = device_ops.Selection.of(selected, plan.lines, engine.device, rest=rest)
    device.selection = selection
    uploads = [host.next_upload() for _ in saved["visible_at"]]
    with host.borrowed(write=True, fresh=True) as on_host_side:
        for name, on_device, on_host in zip(_STATE, device.state(), on_host_side, strict=True):
            matrix = saved[name].reshape(plan.shape[0], -1)
            lines = matrix if plan.dim == 0 else matrix.t()
            on_device.copy_(lines[saved["selected"].long()])
            on_host.copy_(lines[saved["rest"].long()])
        for upload in uploads:
            upload.copy_(on_host_side.master)
    device.score.copy_(saved["score"])
    device.steps, device.selected_at = int(saved["step"]) if plan.k else 0, saved["selected_at"]
    host.taken = int(saved["taken"])
    _load_window(offloaded, saved)
    if (residual := _residual(offloaded)) is not None:
        residual.lost.copy_(saved["residual"])
    for visible_at, upload in zip(saved["visible_at"], uploads, strict=True):
        job = Job((), deadline=0, step=engine.step, param=plan.name, ready=lambda: None)
        host.closes.append(Close(job=job, upload=upload, closed_at=engine.step - 1, visible_at=visible_at))
    offloaded.accumulates, offloaded.eager, offloaded.single = saved["accumulates"], saved["eager"], saved["single"]
    engine.schedule.restore(plan.index, saved["schedule"])
    offloaded.weights.expect(saved["shown"])
