"""The rule that an optimizer of PyTorch has by its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zenflow_compile import rules
from zenflow_compile.rules import Rule

Groups = Sequence[Mapping[str, Any]]


def rule_of(name: str, given: Mapping[str, Any]) -> Rule | None:
    """The rule of ``torch.optim.NAME``; None if it is AdamW's, with the numbers that ``ZenFlowAdamW`` takes.

    Args:
        given: arguments by name, defaults included; ``params`` is a list.

    Raises:
        ValueError: no rule here computes the same.
    """
    groups = [{**given, **group} if isinstance(group, dict) else given for group in given["params"]]
    for switch in ("capturable", "differentiable"):
        if any(group.get(switch) for group in groups):
            raise ValueError(f"{switch}=True")
    kind = _RULES[name](groups)
    return None if kind is None else kind(**{name: given[name] for name in (*kind.defaults, *kind.arguments)})


def _all(groups: Groups, switch: str, default: bool = False) -> bool:
    """A switch that all groups have alike."""
    values = {bool(group.get(switch, default)) for group in groups}
    if len(values) > 1:
        raise ValueError(f"groups with and without {switch}: they are of two rules")
    return values.pop() if values else False


def _adam(groups: Groups, decoupled: bool) -> type[Rule] | None:
    amsgrad = _all(groups, "amsgrad")
    in_gradient = [group["weight_decay"] and not group.get("decoupled_weight_decay", decoupled) for group in groups]
    if not any(in_gradient):
        if amsgrad:  # a decay that comes later is that of the program's optimizer
            return rules.AdamWAMSGrad if _all(groups, "decoupled_weight_decay", decoupled) else rules.AMSGrad
        return None
    if any(group["weight_decay"] for group in groups if group.get("decoupled_weight_decay", decoupled)):
        raise ValueError("weight decay in the gradient of some groups, and not of others: they are of two rules")
    return rules.AMSGrad if amsgrad else rules.Adam


def _sgd(groups: Groups) -> type[Rule]:
    """Schedulers may give it a momentum later."""
    return rules.NesterovSGD if _all(groups, "nesterov") else rules.SGD


def _rmsprop(groups: Groups) -> type[Rule]:
    return rules.CenteredRMSprop if _all(groups, "centered") else rules.MomentumRMSprop


def _adagrad(groups: Groups) -> type[Rule]:
    if any(group["initial_accumulator_value"] for group in groups):
        raise ValueError("initial_accumulator_value above 0: here sums begin at 0")
    return rules.Adagrad


def _in_gradient(kind: type[Rule]) -> Callable[[Groups], type[Rule]]:
    def found(groups: Groups) -> type[Rule]:
        if any(group["decoupled_weight_decay"] for group in groups):
            raise ValueError("decoupled_weight_decay=True, and the rule here has its weight decay in the gradient")
        return kind

    return found


_RULES: Mapping[str, Callable[[Groups], type[Rule] | None]] = {
    "AdamW": lambda groups: _adam(groups, decoupled=True),
    "Adam": lambda groups: _adam(groups, decoupled=False),
    "NAdam": _in_gradient(rules.NAdam),
    "RAdam": _in_gradient(rules.RAdam),
    "Adamax": lambda _: rules.Adamax,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "SGD": _sgd,
    "Muon": lambda _: rules.Muon,
}

NAMES = tuple(_RULES)
"""Optimizers of ``torch.optim`` that have a rule here."""
