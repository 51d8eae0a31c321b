"""Checks the values of param groups, whether they come from users, schedulers or saved states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zenflow_compile.checks.validate import check_flag, check_number
from zenflow_compile.options.options import OPTION_NAMES
from zenflow_compile.runtime.adam_rule import StepCoefficients
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.number import Number

LARGEST_NUMBER = 1e30
"""Largest lr, eps, weight_decay, and product of lr and weight_decay: sums over an update window, divided by a bias
correction, stay in fp32's range."""

_REFUSED = {
    "amsgrad": "the maximum of past second moments is not kept; use amsgrad=False",
    "capturable": "CUDA graphs are not supported in this version; use capturable=False",
    "differentiable": "updates run outside of autograd; use differentiable=False",
}
_IMPLEMENTATIONS = ("foreach", "fused")
"""Switches of ``torch.optim.AdamW`` that change nothing here: updates of many parameters are always fused."""

_NEEDED = ("lr", "betas", "eps", "weight_decay")
_CHECKED = (*_NEEDED, "maximize", "decoupled_weight_decay", *_IMPLEMENTATIONS, *_REFUSED)
_IMMUTABLE = (float, int, bool, type(None))


class GroupNumbers(NamedTuple):
    """The numbers of a checked param group: users may have set them as tensors, and may change them at any time."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool

    def coefficients(self, grad_scale: Number) -> StepCoefficients:
        """The coefficients of an optimizer step, whose ``grad_scale`` on the group's gradients ``maximize`` negates."""
        scale = -grad_scale if self.maximize else grad_scale
        return StepCoefficients(self.lr, self.beta1, self.beta2, self.weight_decay, scale)


def check_group(group: Mapping[str, Any]) -> None:
    """Check a new param group before anything uses it.

    Args:
        group: with all defaults filled in.

    Raises:
        ValueError: a value out of range or missing, an option of the whole optimizer, or a switch of
            ``torch.optim.AdamW`` that is on and has no counterpart here.
        TypeError: a value of the wrong kind.
    """
    for name in OPTION_NAMES:
        if name in group:
            raise ValueError(
                f"a param group has {name}={group[name]!r}, an option of the whole optimizer: pass it to ZenFlowAdamW "
                "itself, or give those parameters an optimizer of their own; groups may differ in lr, betas, eps, "
                "weight_decay and maximize"
            )
    check_values(group)


def values_of(groups: Sequence[Mapping[str, Any]]) -> list[object] | None:
    """The objects that ``check_groups`` checks. None if one of them can change in place, such as a tensor."""
    values = [group.get(name, _REFUSED) for group in groups for name in _CHECKED]
    flat = [each for value in values for each in (value if type(value) is tuple else (value,))]
    return values if all(type(each) in _IMMUTABLE or each is _REFUSED for each in flat) else None


def check_groups(groups: Sequence[Mapping[str, Any]]) -> list[GroupNumbers]:
    """Check the current values of param groups: users and schedulers write into them at any time.

    Returns:
        The numbers of each group.

    Raises:
        ValueError, TypeError: see :func:`check_values`; the message has the group's number.
    """
    checked: list[GroupNumbers] = []
    for number, group in enumerate(groups):
        try:
            checked.append(check_values(group))
        except (ValueError, TypeError) as error:
            raise type(error)(f"in param_groups[{number}], {error}") from error
    return checked


def check_values(group: Mapping[str, Any]) -> GroupNumbers:
    """Check the values of a param group, and return its numbers. Each tensor is read one time.

    Raises: see :func:`check_group`.
    """
    for name in _NEEDED:
        if name not in group:
            raise ValueError(f"{name} is missing; set it again, as in optimizer.param_groups[0][{name!r}] = ...")
    lr = check_number("lr", _number("lr", group["lr"]), 0.0, LARGEST_NUMBER)
    eps = check_eps(group["eps"])
    decay = check_number("weight_decay", _number("weight_decay", group["weight_decay"]), 0.0, LARGEST_NUMBER)
    if lr * decay > LARGEST_NUMBER:
        raise ValueError(f"lr={lr} times weight_decay={decay} must be at most {LARGEST_NUMBER:g}; lower one of them")
    beta1, beta2 = _check_betas(group["betas"])
    maximize = check_flag("maximize", group.get("maximize", False))
    for name in _IMPLEMENTATIONS:
        if (value := group.get(name)) is not None:
            check_flag(name, value)
    for name, reason in _REFUSED.items():
        if (value := group.get(name)) is not None and check_flag(name, value):
            raise ValueError(f"{name}=True of torch.optim.AdamW is not supported: {reason}")
    if group.get("decoupled_weight_decay", True) is not True and decay != 0:
        raise ValueError(
            f"decoupled_weight_decay={group['decoupled_weight_decay']!r} is torch.optim.Adam's, whose weight decay is "
            "part of the gradient, and this optimizer decays as AdamW does: leave it out, or set weight_decay=0"
        )
    return GroupNumbers(lr, beta1, beta2, decay, eps, maximize)


def check_eps(eps: Any) -> float:
    """``eps`` as a number; raises ValueError or TypeError if no step can use it."""
    return check_number("eps", _number("eps", eps), 0.0, LARGEST_NUMBER)


def _number(name: str, value: Any) -> Any:
    """The element of a tensor of one element, and any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} is a tensor of {value.numel()} elements; it must be a number, or a tensor of one")
    return device_of(value.device).to_host(value, name).item()


def _check_betas(betas: Any) -> tuple[float, ...]:
    allowed = "two numbers in [0, 1), such as (0.9, 0.999)"
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be {allowed}")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError(f"betas={betas!r} must be {allowed}, both of them floats or both tensors")
    names = [f"betas[{place}]" for place in range(2)]
    numbers = tuple(check_number(name, _number(name, beta), 0.0, 1.0) for name, beta in zip(names, betas, strict=True))
    if 1.0 in numbers:
        raise ValueError(f"betas={betas!r} must be {allowed}")
    return numbers
