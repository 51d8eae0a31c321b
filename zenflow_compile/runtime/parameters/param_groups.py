"""Checks the values of param groups, whether they come from users, schedulers or saved states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zenflow_compile.checks.validate import check_flag
from zenflow_compile.options.options import OPTION_NAMES
from zenflow_compile.rules.rule import Rule, plain
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.number import Number
from zenflow_compile.runtime.update_rule import StepCoefficients

_REFUSED = {
    "capturable": "CUDA graphs are not supported in this version; use capturable=False",
    "differentiable": "updates run outside of autograd; use differentiable=False",
}
_IMPLEMENTATIONS = ("foreach", "fused")
"""Switches of PyTorch's optimizers that change nothing here: updates of many parameters are always fused."""

_CHECKED = ("rule", "maximize", "decoupled_weight_decay", *_IMPLEMENTATIONS, *_REFUSED)
_IMMUTABLE = (float, int, bool, str, type(None))


class GroupNumbers(NamedTuple):
    """The numbers of a checked param group: users may have set them as tensors, and may change them at any time.

    Attributes:
        options: as the rule has them.
    """

    options: Any
    maximize: bool

    def coefficients(self, grad_scale: Number, rule: Rule) -> StepCoefficients:
        """The coefficients of an optimizer step, whose ``grad_scale`` on the group's gradients ``maximize`` negates."""
        return StepCoefficients(self.options, -grad_scale if self.maximize else grad_scale, rule)


def check_group(group: Mapping[str, Any], rule: Rule) -> None:
    """Check a new param group before anything uses it.

    Args:
        group: with all defaults filled in.

    Raises:
        ValueError: a value out of range or missing, an option of the whole optimizer, or a switch of
            PyTorch's optimizers that is on and has no counterpart here.
        TypeError: a value of the wrong kind.
    """
    for name in OPTION_NAMES:
        if name in group:
            raise ValueError(
                f"a param group has {name}={group[name]!r}, an option of the whole optimizer: pass it to the optimizer "
                "itself, or give those parameters an optimizer of their own; groups may differ in "
                f"{', '.join(rule.defaults)} and maximize"
            )
    check_values(group, rule)


def values_of(groups: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> list[object] | None:
    """The objects that ``check_groups`` checks. None if one of them can change in place, such as a tensor."""
    values = [
        group.get(name, _REFUSED)
        for group, rule in zip(groups, rules, strict=True)
        for name in (*rule.defaults, *rule.switches, *rule.fixed, *_CHECKED)
    ]
    flat = [each for value in values for each in (value if type(value) is tuple else (value,))]
    return values if all(type(each) in _IMMUTABLE or each is _REFUSED for each in flat) else None


def check_groups(groups: Sequence[Mapping[str, Any]], rules: Sequence[Rule]) -> list[GroupNumbers]:
    """Check the current values of param groups: users and schedulers write into them at any time.

    Returns:
        The numbers of each group.

    Raises:
        ValueError, TypeError: see :func:`check_values`; the message has the group's number.
    """
    checked: list[GroupNumbers] = []
    for number, (group, rule) in enumerate(zip(groups, rules, strict=True)):
        try:
            checked.append(check_values(group, rule))
        except (ValueError, TypeError) as error:
            raise type(error)(f"in param_groups[{number}], {error}") from error
    return checked


def check_values(group: Mapping[str, Any], rule: Rule) -> GroupNumbers:
    """Check the values of a param group, and return its numbers. Each tensor is read one time.

    Raises: see :func:`check_group`.
    """
    for name in rule.defaults:
        if name not in group:
            raise ValueError(f"{name} is missing; set it again, as in optimizer.param_groups[0][{name!r}] = ...")
    options = rule.options_of({name: _plain(name, group[name]) for name in rule.defaults})
    maximize = check_flag("maximize", group.get("maximize", False))
    for name in _IMPLEMENTATIONS:
        if (value := group.get(name)) is not None:
            check_flag(name, value)
    for name, reason in _REFUSED.items():
        if (value := group.get(name)) is not None and check_flag(name, value):
            raise ValueError(f"{name}=True of torch.optim.{type(rule).__name__} is not supported: {reason}")
    kind = type(rule).__name__
    if (name := group.get("rule", kind)) != kind:
        raise ValueError(
            f"rule={name!r} of a param group cannot change: it is {kind}; make a new optimizer, or add another group"
        )
    rule.check_switches(group)
    for name, value in rule.fixed.items():
        given = group.get(name, value)
        if (tuple(given) if isinstance(given, list) else given) != value:
            remedy = f"pass it to {kind}({name}=...)" if name in rule.arguments else "choose the rule that has it"
            raise ValueError(
                f"{name}={given!r} differs from the {value!r} of the rule {kind}, which groups cannot change; {remedy}"
            )
    return GroupNumbers(options, maximize)


def _plain(name: str, value: Any) -> Any:
    return plain(name, value, lambda tensor: device_of(tensor.device).to_host(tensor, name))
