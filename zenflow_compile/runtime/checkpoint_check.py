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
from zenflow_compile.runtime.param_groups import check_group

FORMAT = 4
CHOSEN = ("policy", "ratio", "update_stride", "spare_device_bytes", "offload_device")  # may be by a measurement
_MODEL = ("shape", "dtype")
_PLANNED = ("placement", "dim", "k", "interval", "phase", "staleness", "summed", "compressed")
_COUNTS, _NORMS = ("attempted", "seen"), ("waiting", "selected")  # of a schedule


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
    whole = _Part(meta, "the optimizer")
    if (found := whole.plain("format")) != FORMAT:
        raise ValueError(
            f"the state dict has format {found}, this version reads {FORMAT}; go on with the version that wrote it, or "
            "load the weights alone and start with a new optimizer"
        )
    whole.count("step")
    whole.count("shortest_window", optional=True)
    parts = _Part(state, "the optimizer")
    _check_groups(groups, parts.items("param_groups"))
    for name in CHOSEN:
        whole.plain(name)
    if (policy := whole.value("policy")) != engine.plan.policy:
        raise ValueError(
            f"the state dict was saved with policy={policy!r}, this optimizer has {engine.plan.policy!r}; "
            f"create it with the saved policy{_remedy(engine, meta)}"
        )
    params = whole.items("params")
    if len(params) != len(engine.plan.params):
        raise ValueError(
            f"the state dict has {len(params)} parameters, this optimizer {len(engine.plan.params)}; it belongs to "
            "another model"
        )
    entries = parts.mapping("state")
    for saved, plan in zip(params, engine.plan.params, strict=True):
        part = _Part(saved, f"parameter {plan.index}")
        _check_plan(engine, meta, part, plan)
        _check_entry(str(part.plain("name")), entries.get(plan.index), plan)


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Any]) -> None:
    """Whether param groups have the same sizes, and values that a step can use."""
    parts = [_Part(group, f"param group {number}") for number, group in enumerate(saved)]
    saved_sizes = [len(part.items("params")) for part in parts]
    own_sizes = [len(group["params"]) for group in groups]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"the state dict has param groups of sizes {saved_sizes}, this optimizer {own_sizes}; give it the groups "
            "that the saved one had"
        )
    for number, (own, group) in enumerate(zip(groups, saved, strict=True)):
        try:
            check_group({**own, **group})
        except (TypeError, ValueError) as error:
            raise ValueError(f"in param group {number} of the state dict, {error}") from error


def _check_plan(engine: Engine, meta: Mapping[str, Any], part: _Part, plan: ParamPlan) -> None:
    """Whether a parameter was planned as it is here."""
    for key, value in described(plan).items():
        saved = part.plain(key)
        if key == "name" or saved == value:
            continue
        difference = (
            f"the state dict has {key}={saved!r} for {part.plain('name')}, this optimizer {value!r} for {plan.name}"
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
    part.count("step")
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
    part.count("taken")
    part.count("selected_at", optional=True)
    for key in ("accumulates", "eager", "single"):
        part.flag(key)
    _check_window(part, plan)
    lost = (torch.float32 if plan.dtype == torch.float32 else torch.bfloat16) if plan.compressed else None
    part.tensor("residual", rest, lost if plan.held else None)
    closes = part.items("visible_at", plan.uploads)
    if not all(_is_count(each) for each in closes):
        part.refuse("'visible_at' that are not whole numbers >= 0")
    part.tensor("shown", rest, plan.dtype if closes else None)
    _check_schedule(_Part(part.value("schedule"), part.name))


def _check_schedule(part: _Part) -> None:
    part.only((*_COUNTS, *_NORMS, "leaving", "latest"))
    for key in _COUNTS:
        part.count(key)
    for key in _NORMS:
        part.number(key)
    part.number("leaving", optional=True)
    if part.value("latest") is not None and not _are_numbers(part.items("latest"), 2):
        part.refuse("'latest' that is not a pair of numbers")


def _check_window(part: _Part, plan: ParamPlan) -> None:
    """The open window: a gradient for each of the coefficients, or their sum."""
    coefficients = part.items("coefficients", plan.interval)
    if not all(_are_numbers(each, len(SlotCoefficients._fields)) for each in coefficients):
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

    def only(self, keys: Sequence[str]) -> None:
        """Refuse entries that nothing would read."""
        if unknown := [key for key in self._content if key not in keys]:
            self.refuse(f"an unknown entry {unknown[0]!r}")

    def mapping(self, key: str) -> Mapping[Any, Any]:
        value = self.value(key)
        if not isinstance(value, Mapping):
            self.refuse(f"{key!r} that is a {type(value).__name__} instead of a dict")
        return value

    def plain(self, key: str) -> Any:
        """A value, or a list of values, that compares with any other."""
        value = self.value(key)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not (each is None or isinstance(each, (str, numbers.Real))):
                self.refuse(f"{key!r} that holds a {type(each).__name__}")
        return value

    def number(self, key: str, *, optional: bool = False) -> None:
        value = self.value(key)
        if not (isinstance(value, numbers.Real) or (optional and value is None)):
            self.refuse(f"{key}={value!r}, which is no number,")

    def count(self, key: str, *, optional: bool = False) -> None:
        self.number(key, optional=optional)
        value = self.value(key)
        if value is not None and not _is_count(value):
            self.refuse(f"{key}={value!r}, which is no whole number >= 0,")

    def flag(self, key: str) -> None:
        value = self.value(key)
        if not isinstance(value, bool):
            self.refuse(f"{key}={value!r}, which is neither True nor False,")

    def items(self, key: str, at_most: int | None = None) -> Sequence[Any]:
        value = self.value(key)
        if not isinstance(value, (list, tuple)):
            self.refuse(f"{key!r} that is a {type(value).__name__} instead of a list")
        if at_most is not None and len(value) > at_most:
            self.refuse(f"{key!r} of {len(value)} entries, which may be {at_most} at most,")
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
        if value.layout != torch.strided or value.device.type == "meta":
            self.refuse(f"{key!r} that is not dense (layout {value.layout}, device {value.device})")
        if value.shape != torch.Size(shape) or value.dtype != dtype:
            self.refuse(
                f"{key!r} of shape {list(value.shape)} and {value.dtype}, not {list(shape)} and {dtype},"
            )


def _is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on; a resident's steps are one as a float."""
    return isinstance(value, numbers.Real) and float(value).is_integer() and float(value) >= 0.0


def _are_numbers(value: Any, count: int) -> bool:
    listed = isinstance(value, (list, tuple)) and len(value) == count
    return listed and all(isinstance(each, numbers.Real) for each in value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _remedy(engine: Engine, meta: Mapping[str, Any]) -> str:
    """What to pass instead of what was chosen by a measurement, if some of that is what differs."""
    saved = {name: meta[name] for name in CHOSEN}
    own = {name: getattr(engine.options, name) for name in CHOSEN}
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
