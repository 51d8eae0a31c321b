"""Checks a state dict completely before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.planning.planners import shard_of
from zenflow_compile.rules.rule import Rule
from zenflow_compile.runtime.checkpoint.conversion import convert, has_open_window, have_one_layout, saved_plan
from zenflow_compile.runtime.checkpoint.format import (
    CHOSEN,
    FORMAT,
    NONE,
    POLICIES,
    SCHEDULE,
    Field,
    chosen,
    layout,
    plan_entry,
    planned,
    saved_coefficients,
)
from zenflow_compile.runtime.checkpoint.shares import local_entry
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.parameters.param_groups import check_group
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.torch_internals import torch_private

# Options of PyTorch's kernels, which a group of ours does not take over.
_EXECUTION = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
# The least value of an entry that counts; NONE stands for None.
_LEAST = {"optimizer_step": 0, "open": 0, "selected_at": NONE, "selecting_ranks": 1, "shortest_window": NONE}


@dataclass(frozen=True, slots=True)
class Checked:
    """A state dict that can be loaded.

    Attributes:
        entries: by index of the parameter: all of the layout, or those of PyTorch's optimizer. A parameter without
            entries has had no gradient.
        groups: the values that each param group takes over.
        step: optimizer steps.
        shortest_window: least length of adaptive update windows; None if it will be measured, or does not exist.
        weights: of parameters whose update window had to be flushed; of this rank's part of a sharded one.
        converted: indices of parameters that were saved with other options.
    """

    entries: dict[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    step: int
    shortest_window: int | None
    weights: dict[int, Tensor]
    converted: frozenset[int]


def check_state(engine: Engine, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> Checked:
    """Check a state dict of a ZenFlow or of PyTorch's optimizer of its rule, with parameters by number or by name.

    Raises:
        ValueError: the state is damaged, not complete, or of another model or plan.
    """
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        raise ValueError(
            "the state dict is neither of a ZenFlow or ZenFlowAdamW nor of an optimizer of PyTorch: it must have "
            "'state' and 'param_groups'; load what state_dict() returned"
        )
    if "zenflow" in state:
        refuse_format(4)
    whole = _Part(state, "the optimizer")
    saved = whole.get("state", Mapping, "dict")
    is_ours = any(isinstance(entry, Mapping) and "plan" in entry for entry in saved.values())
    listed = whole.get("param_groups", (list, tuple), "list")
    keys, taken = _check_groups(groups, listed, engine.registry.rules, is_ours=is_ours)
    index_of = {id(param): index for index, param in enumerate(engine.registry.given)}
    places = [index_of[id(param)] for group in groups for param in group["params"]]
    index_by_key = dict(zip(keys, places, strict=True))
    entries: dict[int, Mapping[str, Any]] = {}
    for key, entry in saved.items():
        if key not in index_by_key:
            whole.refuse(f"an entry {key!r} in 'state' that is in no param group")
        content = _Part(entry, f"parameter {key!r}").content
        # Tensors may require gradients, as those that a learned optimizer or a differentiable AdamW has made.
        entries[index_by_key[key]] = {
            name: value.detach() if isinstance(value, Tensor) else value for name, value in content.items()
        }
    # An AdamW that loads and saves a state of ours casts all entries to the parameter's dtype.
    plans = [entry.get("plan") for entry in entries.values()]
    if any(isinstance(each, Tensor) and each.is_floating_point() for each in plans):
        entries = {index: _updated_by_pytorch(engine, index, entry) for index, entry in entries.items()}
    elif _is_filled_in(engine, entries):
        for index, entry in entries.items():
            rule = engine.plan.params[index].rule
            of_rule = rule.from_pytorch(entry)
            entries[index] = {name: of_rule[name] for name in _entries_of_pytorch(rule) if name in of_rule}
    if not any("plan" in entry for entry in entries.values()):
        return _check_pytorch_state(engine, entries, taken)
    weights: dict[int, Tensor] = {}
    converted: set[int] = set()
    steps: set[int] = set()
    shortest: set[int] = set()
    for index, own in enumerate(engine.plan.params):
        plan = own.whole
        if index not in entries:
            if engine.params[index].requires_grad:
                raise ValueError(f"the state dict has no state for {plan.name!r}; it is not complete")
            continue  # get_optimizer_state_dict() leaves out those that take no gradient
        saved_before = _saved_plan(_Part(entries[index], repr(plan.name)), plan)
        if isinstance(param := engine.params[index], LocalShard):
            param.follow()  # its weight is compared below, and may have been loaded as other memory
            _check_model_shape(_Part(entries[index], repr(plan.name)), tuple(param.sharded.shape), plan.rule)
            if param.by.dim not in (0, saved_before.row_dims) and (
                saved_before.selects or has_open_window(entries[index])
            ):
                raise ValueError(
                    f"the state dict was saved with slices of {plan.name!r} whose rows were its first "
                    f"{saved_before.row_dims} dimensions, and the model is sharded along dimension {param.by.dim}, "
                    "which divides neither these rows nor columns as a whole; load it where the model is not sharded "
                    "like this, with row_dims of 1 for this parameter, and save it again"
                )
            saved_before = shard_of(saved_before, param.by)
            entries[index] = local_entry(saved_before, param, entries[index])
            plan = own
        entry = entries[index]
        _check_entries(entry, saved_before)
        steps.add(int(entry["optimizer_step"]))
        if was_adaptive := "shortest_window" in entry:
            shortest.add(int(entry["shortest_window"]))
        has_layout = have_one_layout(plan, saved_before) and was_adaptive == engine.plan.adaptive
        if not has_layout or plan.k != saved_before.k:
            converted.add(index)
        if index in converted or _selected_by_others(entry, plan):
            entries[index], weight = convert(
                plan, saved_before, entry, engine.registry.weight_of(index), has_layout=has_layout
            )
            if weight is not None:
                weights[index] = weight
    if len(steps) > 1 or len(shortest) > 1:
        raise ValueError(
            f"the state dict has parameters that were saved after {sorted(steps)} steps; it is put together of several "
            "states: load it as state_dict() returned it"
        )
    window = shortest.pop() if shortest else NONE
    return Checked(entries, taken, steps.pop(), None if window == NONE else window, weights, frozenset(converted))


def refuse_format(found: int) -> NoReturn:
    raise ValueError(
        f"the state dict has format {found}, this version reads {FORMAT}; go on with the version that wrote it, or "
        "load the weights alone and start with a new optimizer"
    )


def _check_groups(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Any], rules: Sequence[Rule], *, is_ours: bool
) -> tuple[list[int | str], list[dict[str, Any]]]:
    """The saved names of all parameters in the order of the groups, and the values that each own group takes over."""
    parts = [_Part(group, f"param group {number}") for number, group in enumerate(saved)]
    names = [part.get("params", (list, tuple), "list") for part in parts]
    saved_sizes = [len(each) for each in names]
    own_sizes = [len(group["params"]) for group in groups]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"the state dict has param groups of sizes {saved_sizes}, this optimizer {own_sizes}; give it the groups "
            "that the saved one had"
        )
    keys: list[int | str] = []
    for part, listed in zip(parts, names, strict=True):
        if not all(isinstance(name, (int, str)) for name in listed):
            part.refuse("'params' that are neither numbers nor names")
        keys += listed
    if len(set(keys)) < len(keys):
        raise ValueError("the state dict has a parameter in its param groups twice; it is damaged")
    taken = []
    for number, (own, group, rule) in enumerate(zip(groups, saved, rules, strict=True)):
        of_rule = type(rule).__name__
        by_default = "AdamW" if is_ours else of_rule  # groups of a ZenFlowAdamW do not name it, as those of PyTorch
        try:
            values = _taken_over(own, group)
            if (saved_rule := group.get("rule", by_default)) != of_rule:
                raise ValueError(
                    f"the rule is {saved_rule!r}, and this optimizer's {of_rule!r}; load it into one of its rule"
                )
            switches = {name: group[name] for name in ("decoupled_weight_decay",) if name in group}
            check_group({**own, **values, **switches}, rule)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"in param group {number} of the state dict, {error}") from error
        taken.append(values)
    return keys, taken


def _taken_over(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    ignored = ("params", "param_names", *_EXECUTION)
    return {
        # full_state_dict=True turns tuples into lists
        name: tuple(value) if isinstance(value, list) and isinstance(own.get(name), tuple) else value
        for name, value in saved.items()
        if name not in ignored
    }


# States of PyTorch's optimizers.


def _is_filled_in(engine: Engine, entries: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether PyTorch has put a state of its own into that of a new optimizer, which no step has counted.

    ``set_optimizer_state_dict`` fills in what a full state lacks, and ``dcp.load`` reads into what
    ``get_optimizer_state_dict`` returned.
    """
    counts = [(entry.get("step"), entry.get("optimizer_step")) for entry in entries.values()]
    known = [(step, count) for step, count in counts if isinstance(step, Tensor) and isinstance(count, Tensor)]
    if not known or any(bool(count.any()) for _, count in known):
        return False
    return (
        any(bool((step > 0).all()) for step, _ in known)
        or any(
            bool(value.any())  # of an optimizer that counts no steps
            for index, entry in entries.items()
            for name in _entries_of_pytorch(engine.plan.params[index].rule)[1:]
            if isinstance(value := entry.get(name), Tensor)
        )
    )


def _updated_by_pytorch(engine: Engine, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that the optimizer of PyTorch has updated; the others are older.

    Raises:
        ValueError: an update window held gradients then, which PyTorch's optimizer has not applied.
    """
    plan = engine.plan.params[index]
    entry = plan.rule.from_pytorch(entry)
    part, names = _Part(entry, repr(plan.name)), _entries_of_pytorch(plan.rule)
    if "open" in entry and bool(part.tensor("open").count_nonzero()):
        raise ValueError(
            f"the state dict was loaded into an optimizer of PyTorch with gradients waiting in the update window of "
            f"{part.name}, which it has not applied: call flush() before the state is saved for it, or keep only "
            f"{', '.join(map(repr, names))} of each parameter to go on without these gradients"
        )
    return {key: value for key, value in entry.items() if key in (*names, "max_exp_avg_sq")}


def _entries_of_pytorch(rule: Rule) -> tuple[str, ...]:
    """The entries that the optimizer of PyTorch has by the same rule."""
    return "step", *(array.name for array in rule.arrays)


def _check_pytorch_state(engine: Engine, entries: dict[int, Mapping[str, Any]], taken: list[dict[str, Any]]) -> Checked:
    """Check a state of PyTorch's optimizer. Its number of steps is that of the parameter with most gradients."""
    for group, rule in zip(taken, engine.registry.rules, strict=True):
        if missing := [name for name in rule.defaults if name not in group]:
            kind = type(rule).__name__
            ours = "a ZenFlowAdamW" if rule.fused else f"a ZenFlow with the rule {kind}"
            raise ValueError(
                f"the state dict is neither of {ours} nor of torch.optim.{kind}: its param groups have no "
                f"{missing[0]!r}; load the state of one of these"
            )
    used: dict[int, Mapping[str, Any]] = {}
    for index, entry in entries.items():
        plan = engine.plan.params[index].whole
        if not entry:
            continue  # the parameter has had no gradient
        entry, names = plan.rule.from_pytorch(entry), _entries_of_pytorch(plan.rule)
        part = _Part(entry, repr(plan.name))
        if "max_exp_avg_sq" in entry and "max_exp_avg_sq" not in names:
            raise ValueError(
                f"the state dict has 'max_exp_avg_sq' for {plan.name!r}, of a torch.optim.AdamW with amsgrad=True, "
                "which is not supported by this rule; load the state of one without amsgrad"
            )
        part.check_names(names)
        _check_model_shape(part, tuple(engine.registry.given[index].shape), plan.rule)
        if isinstance(param := engine.params[index], LocalShard):
            own = engine.plan.params[index]
            entry = local_entry(own, param, entry)
            part, plan = _Part(entry, repr(plan.name)), own
        for key in names[1:]:
            dtype = part.tensor(key).dtype
            part.check_tensor(key, Field(plan.shape, dtype))
            if not dtype.is_floating_point:
                part.refuse(f"{key!r} of {dtype}")
            part.check_values(key, plan.rule)
        used[index] = {**entry, "step": float(part.step())}
    step = max((int(entry["step"]) for entry in used.values()), default=0)
    return Checked(used, taken, step, None, {}, frozenset())


# States of this optimizer.


def _check_entries(entry: Mapping[str, Any], plan: ParamPlan) -> None:
    """Check that the entries of one parameter are complete, of this plan, and have values that a step can use."""
    part = _Part(entry, repr(plan.name))
    _check_model_shape(part, plan.shape, plan.rule)
    expected = layout(plan, adaptive="shortest_window" in entry)
    for key, field in expected.items():
        part.check_tensor(key, field)
        part.check_values(key, plan.rule)
    part.check_names(expected)
    gradients, step = part.step(), int(entry["optimizer_step"])
    if gradients > step:
        part.refuse(f"step={gradients} with optimizer_step={step}, which counts every step,")
    if "mask" in expected and not _selected_by_others(entry, plan):
        if (count := int(entry["mask"].sum())) != plan.k:
            part.refuse(f"'mask' with {count} selected slices, not {plan.k},")
        of_groups = [int(entry["mask"][group :: plan.groups].sum()) for group in range(plan.groups)]
        if of_groups != [len(range(group, plan.k, plan.groups)) for group in range(plan.groups)]:
            part.refuse(f"'mask' that does not select {plan.k} slices evenly in {plan.groups} groups of slices,")
    if "mask" in expected and (at := int(entry["selected_at"])) >= max(step, 1):
        part.refuse(f"selected_at={at} with optimizer_step={step}, before which it was,")
    if "open" in expected:
        _check_window(part, plan, gradients)
    if "visible_at" in expected and any(
        at != NONE and not step <= at <= step + plan.staleness for at in entry["visible_at"].tolist()
    ):
        part.refuse(f"'visible_at' that is neither {NONE} nor one of the next {plan.staleness} steps")
    if "schedule" in expected:
        _check_schedule(part)


def _selected_by_others(entry: Mapping[str, Any], plan: ParamPlan) -> bool:
    """Whether another number of ranks selected the slices, each rank among its own, or ranks that had other ones."""
    if "selecting_ranks" not in entry:
        return False
    others_own = plan.selecting_ranks > 1 and "mask" in entry and int(entry["mask"].sum()) != plan.k
    return others_own or int(entry["selecting_ranks"]) != plan.selecting_ranks


def _check_model_shape(part: _Part, own: tuple[int, ...], rule: Rule) -> None:
    if not rule.arrays:
        return
    name = rule.arrays[0].name
    if (shape := tuple(part.tensor(name).shape)) != own:
        raise ValueError(
            f"the state dict has shape={list(shape)} for {part.name}, this optimizer {list(own)}; it "
            "belongs to another model: load it over parameters of that shape"
        )


def _saved_plan(part: _Part, own: ParamPlan) -> ParamPlan:
    """The plan that the parameter had, which may be another one; ValueError if there is no such plan."""
    if "plan" not in part.content:
        part.refuse("no 'plan'")
    saved, expected = part.tensor("plan"), plan_entry(own)
    if saved.dtype != torch.int64 or saved.dim() != 1 or not len(saved):
        part.check_tensor("plan", Field(tuple(expected.shape), torch.int64))
    if (found := int(saved[0])) != FORMAT:
        refuse_format(found)
    part.check_tensor("plan", Field(tuple(expected.shape), torch.int64))
    part.check_tensor("chosen", Field((len(CHOSEN),), torch.float64))
    if (policy := chosen(part.tensor("chosen"))["policy"]) not in POLICIES:
        part.refuse(f"'chosen' with policy={policy!r}")
    values, owned = planned(saved), planned(expected)
    if values["dtype"] != owned["dtype"]:
        raise ValueError(
            f"the state dict has dtype={values['dtype']!r} for {part.name}, this optimizer {owned['dtype']!r}; it "
            "belongs to another model: load it over parameters of that dtype"
        )
    try:
        return saved_plan(own, part.content)
    except ValueError as error:
        part.refuse(str(error))


def _check_window(part: _Part, plan: ParamPlan, gradients: int) -> None:
    """Check the number of gradients in the update window, and the coefficients of each."""
    coefficients, count = part.tensor("coefficients"), int(part.tensor("open"))
    if count > min(len(coefficients), gradients):
        part.refuse(f"open={count} with places for {len(coefficients)} gradients and step={gradients}")
    if not bool(coefficients[:count].isfinite().all()):
        part.refuse("'coefficients' with values that are not finite")
    for each in saved_coefficients(plan, part.content):
        if problem := plan.rule.impossible(each.options):
            part.refuse(f"'coefficients' that no step has ({problem})")


def _check_schedule(part: _Part) -> None:
    values = dict(zip(SCHEDULE, part.tensor("schedule").tolist(), strict=True))
    for name, value in values.items():
        optional = name.startswith(("latest_", "next_")) or name == "leaving"
        whole = name not in ("attempted", "seen") or float(value).is_integer()
        if not (math.isfinite(value) and whole and (value >= 0 or (optional and value == NONE))):
            part.refuse(f"'schedule' with {name}={value!r}")
    for step in ("latest", "next"):
        if (values[f"{step}_selected"] == NONE) != (values[f"{step}_waiting"] == NONE):
            part.refuse(f"'schedule' with half of the {step} norms")


class _Part:
    """A part of a state dict, whose errors name it.

    Args:
        name: for a parameter, its name in quotes: it may come from a file, and is printed.
    """

    def __init__(self, content: Any, name: str) -> None:
        self.name = name
        if not isinstance(content, Mapping):
            self.refuse(f"a {type(content).__name__} instead of a dict")
        self.content: Mapping[Any, Any] = content

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(
            f"the state dict has {problem} for {self.name}; it is damaged or not complete: load it as state_dict() "
            "returned it"
        )

    def get(self, key: str, kind: Any, noun: str) -> Any:
        """The value at ``key``, which must be of the type ``kind``."""
        if key not in self.content:
            self.refuse(f"no {key!r}")
        if not isinstance(value := self.content[key], kind):
            self.refuse(f"{key!r} that is a {type(value).__name__} instead of a {noun}")
        return value

    def tensor(self, key: str) -> Tensor:
        """The dense tensor at ``key``."""
        value: Tensor = self.get(key, Tensor, "tensor")
        if value.layout != torch.strided or value.device.type == "meta":
            self.refuse(f"{key!r} that is not dense (layout {value.layout}, device {value.device})")
        return value

    def step(self) -> int:
        """``step``: a whole number, in a tensor of one element or as it is."""
        value = self.get("step", (Tensor, int, float), "number")
        if isinstance(value, Tensor):
            if self.tensor("step").numel() != 1 or value.is_complex():
                self.refuse(f"'step' of shape {list(value.shape)} and {value.dtype}")
            value = value.item()
        if not 0 <= value < 2**53 or not float(value).is_integer():  # NaN is in no range
            self.refuse(f"step={value!r}, which is not a whole number >= 0,")
        return int(float(value))

    def check_names(self, keys: Iterable[str]) -> None:
        """Refuse entries that would not be read."""
        if unknown := [key for key in self.content if key not in keys]:
            self.refuse(f"an unknown entry {unknown[0]!r}")

    def check_tensor(self, key: str, field: Field) -> None:
        """Check shape and dtype, and that it is no ``DTensor``: ``local_entry`` takes the parts out of these."""
        value = self.tensor(key)
        if torch_private.is_dtensor(value):
            raise ValueError(
                f"the state dict has {key!r} of {self.name} as a DTensor of a sharded model, and here this parameter "
                "is not sharded: load what get_optimizer_state_dict() returns with "
                "StateDictOptions(full_state_dict=True), or save and load by torch.distributed.checkpoint"
            )
        if tuple(value.shape) != field.shape or value.dtype != field.dtype:
            self.refuse(
                f"{key!r} of shape {list(value.shape)} and {value.dtype}, not {list(field.shape)} and {field.dtype},"
            )

    def check_values(self, key: str, rule: Rule) -> None:
        """Check the values of a tensor that ``check_tensor`` has accepted."""
        value = self.tensor(key)
        finite = ("master", *(array.name for array in rule.arrays if not array.nonnegative))
        nonnegative = [array.name for array in rule.arrays if array.nonnegative]
        if key in _LEAST and (number := int(value)) < _LEAST[key]:
            self.refuse(f"{key}={number}, which is not a whole number >= {_LEAST[key]},")
        if key in finite and not bool(value.isfinite().all()):
            self.refuse(f"{key!r} with values that are not finite")
        # Infinite after a gradient that was too large. The comparison is False for NaN.
        if key in nonnegative and not bool((value >= 0).all()):
            self.refuse(f"{key!r} with values that are negative or NaN")
