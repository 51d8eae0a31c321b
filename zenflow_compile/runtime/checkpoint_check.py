"""Whether a state dict is one that an engine can load, decided completely before anything is changed."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from zenflow_compile.options import Options
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.adam import SlotCoefficients
from zenflow_compile.runtime.engine import Engine

FORMAT = 4
CHOSEN = ("policy", "ratio", "update_stride", "spare_device_bytes", "offload_device")  # may be by a measurement
_MODEL = ("shape", "dtype")
_PLANNED = ("placement", "dim", "k", "interval", "phase", "staleness", "summed", "compressed")
_SCHEDULE = ("attempted", "waiting", "selected", "seen")


def described(plan: ParamPlan) -> dict[str, Any]:
    """What a state says of a parameter, as plain values."""
    return {
        "name": plan.name,
        "shape": list(plan.shape),
        "dtype": str(plan.dtype),
        **{name: _plain(getattr(plan, name)) for name in _PLANNED},
    }


def check_state(engine: Engine, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: the state is not of this kind, not complete, or of another model or plan.
    """
    meta = state.get("zenflow") if isinstance(state, Mapping) else None
    if not isinstance(meta, Mapping) or "state" not in state or "param_groups" not in state:
        raise ValueError("the state dict is not of a ZenFlowAdamW: it has no 'zenflow' entry; load one of its own")
    if meta.get("format") != FORMAT:
        raise ValueError(f"the state dict has format {meta.get('format')}, this version reads {FORMAT}")
    whole = _Part(meta, "the optimizer")
    whole.number("step")
    whole.number("shortest_window", optional=True)
    saved_groups = [len(_Part(group, "a param group").value("params")) for group in state["param_groups"]]
    own_groups = [len(group["params"]) for group in groups]
    if saved_groups != own_groups:
        raise ValueError(f"the state dict has param groups of sizes {saved_groups}, this optimizer {own_groups}")
    if (policy := whole.value("policy")) != engine.plan.policy:
        raise ValueError(
            f"the state dict was saved with policy={policy!r}, this optimizer has {engine.plan.policy!r}; "
            f"create it with the saved policy{_remedy(engine, meta)}"
        )
    if (count := len(whole.value("params"))) != len(engine.plan.params):
        raise ValueError(
            f"the state dict has {count} parameters, this optimizer {len(engine.plan.params)}; it belongs to another "
            "model"
        )
    for saved, plan in zip(meta["params"], engine.plan.params, strict=True):
        _check_plan(engine, meta, saved, plan)
        _check_entry(saved["name"], state["state"].get(plan.index), plan)


def _check_plan(engine: Engine, meta: Mapping[str, Any], saved: Mapping[str, Any], plan: ParamPlan) -> None:
    """Whether a parameter was planned as it is here."""
    own, part = described(plan), _Part(saved, f"parameter {plan.index}")
    for key, value in own.items():
        if key == "name" or part.value(key) == value:
            continue
        difference = (
            f"the state dict has {key}={saved[key]!r} for {part.value('name')}, this optimizer {value!r} for "
            f"{plan.name}"
        )
        if key in _MODEL:
            raise ValueError(f"{difference}; it belongs to another model: load it over parameters of that {key}")
        remedy = _remedy(engine, meta) or (
            ". With the same options, param groups were given in other calls, or another parameter was frozen: both "
            "decide where state lives. Give the groups in the same calls, all at construction or by add_param_group(), "
            "and each parameter the requires_grad that it had then"
        )
        raise ValueError(f"{difference}; it belongs to another model, or was saved with other options{remedy}")


def _check_entry(name: str, entry: Any, plan: ParamPlan) -> None:
    """Whether a parameter's state is complete."""
    if entry is None:
        if plan.offloaded:
            raise ValueError(f"the state dict has no state for {name}; it is not complete")
        return  # it had no gradient yet
    part = _Part(entry, name)
    part.number("step")
    if plan.offloaded:
        _check_offloaded(part, plan)
        return
    state_dtype = torch.float64 if plan.dtype == torch.float64 else torch.float32
    for key in ("exp_avg", "exp_avg_sq"):
        part.tensor(key, plan.shape, state_dtype)
    part.tensor("master", plan.shape, None if plan.dtype == state_dtype else state_dtype)


def _check_offloaded(part: _Part, plan: ParamPlan) -> None:
    rest = (plan.rest, plan.length)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        part.tensor(key, plan.shape, torch.float32)
    part.tensor("score", (plan.lines,), torch.float32)
    part.tensor("selected", (plan.k,), torch.int32)
    part.tensor("rest", (plan.rest,), torch.int32)
    lines = torch.cat([part.value("selected").cpu(), part.value("rest").cpu()])
    if not torch.equal(lines.sort().values, torch.arange(plan.lines, dtype=torch.int32)):
        part.refuse(f"'selected' and 'rest' that are not each of the {plan.lines} lines once")
    part.number("taken")
    part.number("selected_at", optional=True)
    for key in ("accumulates", "eager", "single"):
        part.number(key)
    _check_window(part, plan)
    lost = (torch.float32 if plan.dtype == torch.float32 else torch.bfloat16) if plan.compressed else None
    part.tensor("residual", rest, lost if plan.held else None)
    closes = part.items("visible_at", plan.uploads)
    part.tensor("shown", rest, plan.dtype if closes else None)
    schedule = _Part(part.value("schedule"), part.name)
    for key in _SCHEDULE:
        schedule.number(key)
    schedule.number("leaving", optional=True)
    if schedule.value("latest") is not None and len(schedule.items("latest", 2)) != 2:
        schedule.refuse("'latest' that is not a pair")


def _check_window(part: _Part, plan: ParamPlan) -> None:
    """The open window: a gradient for each of the coefficients, or their sum."""
    coefficients = part.items("coefficients", plan.interval)
    if any(len(each) != len(SlotCoefficients._fields) for each in coefficients):
        part.refuse(f"'coefficients' that are not {len(SlotCoefficients._fields)} numbers each")
    window = part.items("window", plan.slots)
    summed = plan.held and plan.summed
    if len(window) != (min(1, len(coefficients)) if summed else len(coefficients)):
        part.refuse(f"{len(window)} gradients for {len(coefficients)} 'coefficients' of its window")
    shape, dtype = ((plan.rest, plan.length), torch.float32) if summed else (plan.slot_shape, plan.slot_dtype)
    for gradient in window:
        part.check_tensor("window", gradient, shape, dtype)


class _Part:
    """A part of a state, read with errors that say what it is of."""

    def __init__(self, content: Any, name: str) -> None:
        self.name = name
        if not isinstance(content, Mapping):
            self.refuse(f"a {type(content).__name__} instead of a dict")
        self._content = content

    def refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"the state dict has {what} for {self.name}; it is damaged or not complete: load it as state_dict() "
            "returned it"
        )

    def value(self, key: str) -> Any:
        if key not in self._content:
            self.refuse(f"no {key!r}")
        return self._content[key]

    def number(self, key: str, *, optional: bool = False) -> None:
        value = self.value(key)
        if not (isinstance(value, numbers.Real) or (optional and value is None)):
            self.refuse(f"{key}={value!r}, which is no number,")

    def items(self, key: str, at_most: int) -> Sequence[Any]:
        value = self.value(key)
        if not isinstance(value, (list, tuple)) or len(value) > at_most:
            self.refuse(f"{key!r} that is no list of at most {at_most} entries")
        return value

    def tensor(self, key: str, shape: Sequence[int], dtype: torch.dtype | None) -> None:
        """``dtype`` None: there must be none."""
        value = self.value(key)
        if dtype is not None:
            self.check_tensor(key, value, shape, dtype)
        elif value is not None:
            self.refuse(f"{key!r}, which must be None,")

    def check_tensor(self, key: str, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
        if not isinstance(value, Tensor):
            self.refuse(f"a {type(value).__name__} instead of a tensor as {key!r}")
        if value.shape != torch.Size(shape) or value.dtype != dtype:
            self.refuse(
                f"{key!r} of shape {list(value.shape)} and {value.dtype}, not {list(shape)} and {dtype},"
            )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _remedy(engine: Engine, meta: Mapping[str, Any]) -> str:
    """What to pass instead of what was chosen by a measurement, if some of that is what differs."""
    saved = {name: meta[name] for name in CHOSEN if name in meta}
    own = {name: getattr(engine.options, name) for name in saved}
    if saved == own:
        return ""
    default = {each.name: each.default for each in fields(Options)}
    given = [
        f"{name}={value!r}"
        for name, value in saved.items()
        if name == "policy" or value != own[name] or value != default[name]
    ]
    if "nvme" in saved.values() or saved["policy"] == "zero_infinity":
        given.append("nvme_path=(a directory)")
    return f": pass {', '.join(given)}"
