"""What an update rule is: pure functions of elements, and the numbers that they share.

A rule is written once. Its functions run as they are on tensors, which is what tests compare with, and are printed as
the code that updates state: see ``tracing``, ``cpp`` and ``triton``.

[Note: windows] An update window has the gradients of one or several steps. ``accumulate`` takes each of them, oldest
first; ``apply`` then moves the weight, once. Between them the values of ``window`` live, which begin at zero and are
not stored. A rule whose ``accumulate`` reads the weight sees the one that the window began with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from zenflow_compile.checks.validate import check_flag, check_number

if TYPE_CHECKING:
    from torch import Tensor

MOST_ARRAYS = 4
"""Arrays of a rule's state, and values of its windows together; ``kMostArrays`` in native/windows.h."""
MOST_ROUNDED = 2
"""Arrays that may be stored in fewer bytes; ``kMostRounded`` there."""
MOST_NUMBERS = 8
"""Numbers of ``accumulate``, and of ``apply``; ``kMostNumbers`` in native/windows.h."""
LARGEST_NUMBER = 1e30
"""Largest lr, eps, weight_decay, and product of lr and weight_decay: sums over an update window, divided by a bias
correction, stay in fp32's range."""


class Array(NamedTuple):
    """An array of a rule's state, with a number per element.

    Attributes:
        nonnegative: no element is below zero, and one above zero must not become zero when it is stored in 8 bits.
        rounded: it may be stored in fewer bytes than fp32.
    """

    name: str
    nonnegative: bool = False
    rounded: bool = True


class Rule(ABC):
    """An update rule, with the numbers that param groups have unless they are given others. All methods are pure.

    Args:
        numbers: by name, any of ``defaults``. Tensors of one element become values of param groups as they are, so that
            one that is written in place counts.

    Raises:
        TypeError: the rule has no number of that name.
        ValueError: no step can use a value.

    Attributes:
        defaults: the numbers of a param group that steps use; ``betas`` are two.
        options: kind of tuple of these numbers, all of them floats: ``betas`` are ``beta1`` and ``beta2``.
        fused: PyTorch has a kernel for many parameters of it at once. A subclass has none.
        decoupled: weight decay is apart from the gradient; None: groups do not say which one they mean.
        switches: numbers of PyTorch's optimizers that ask for another rule, with the name of that rule.
        arrays: of the state; those that may be rounded come first.
        window: names of the values that live until ``apply``.
        of_matrix: the one of them that ``on_matrices`` changes between the last ``accumulate`` and ``apply``; its
            parameters are matrices, which the device updates whole in each step. "": there is none.
        matrix_scratch: bytes of device scratch that an update takes per element of such a matrix.
        arguments: names of what the constructor takes besides numbers. fixed: their values, which groups cannot change.
        of_gradient, of_window: names of the numbers that ``accumulate`` and ``apply`` take.
    """

    defaults: ClassVar[Mapping[str, Any]]
    options: ClassVar[Any]
    fused: ClassVar[bool] = False
    decoupled: ClassVar[bool | None] = None
    switches: ClassVar[Mapping[str, str]] = {}
    arrays: ClassVar[tuple[Array, ...]]
    window: ClassVar[tuple[str, ...]] = ()
    of_matrix: ClassVar[str] = ""
    matrix_scratch: ClassVar[int] = 0
    arguments: ClassVar[tuple[str, ...]] = ()
    fixed: Mapping[str, Any] = MappingProxyType({})
    of_gradient: ClassVar[tuple[str, ...]]
    of_window: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.fused = vars(cls).get("fused", False)
        if "defaults" in vars(cls):
            if "lr" not in cls.defaults or (reserved := _RESERVED.intersection(cls.defaults)):
                wrong = "no 'lr'" if "lr" not in cls.defaults else f"a {min(reserved)!r}, which groups have already"
                raise TypeError(f"{cls.__name__}.defaults has {wrong}; change it")
            names = (("beta1", "beta2") if name == "betas" else (name,) for name in cls.defaults)
            cls.options = _tuple_of(f"{cls.__name__}Options", [name for each in names for name in each])

    def __init__(self, **numbers: Any) -> None:
        if unknown := [name for name in numbers if name not in self.defaults]:
            raise TypeError(f"{type(self).__name__} has no {unknown[0]!r}; it has {', '.join(self.defaults)}")
        self.numbers = tuple({**self.defaults, **numbers}.items())
        _ = self.initial  # raises if no step can use a value

    @property
    def initial(self) -> Any:
        """``options`` that the rule begins with."""
        return self.options_of({name: plain(name, value) for name, value in self.numbers})

    def options_of(self, group: Mapping[str, Any]) -> Any:
        """The ``options`` of a param group, whose values are numbers.

        Raises:
            ValueError, TypeError: no step can use a value.
        """
        values: list[float] = []
        for name in self.defaults:
            if name == "betas":
                values += check_betas(group[name])
            else:
                values.append(check_number(name, group[name], 0.0, LARGEST_NUMBER))
        options = self.options(*values)
        lr, decay = options.lr, getattr(options, "weight_decay", 0.0)
        if lr * decay > LARGEST_NUMBER:
            raise ValueError(
                f"lr={lr} times weight_decay={decay} must be at most {LARGEST_NUMBER:g}; lower one of them"
            )
        return options

    def check_change(self, first: Any, now: Any) -> None:  # noqa: B027 - most rules take any
        """Raise ValueError if a step cannot have the options ``now``, where the ``first`` ones were others."""

    def from_pytorch(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter's entry in a state of PyTorch's optimizer, with ``step`` and ``arrays`` as they are here."""
        return entry

    def impossible(self, options: Any) -> str:
        """What is wrong with numbers that were read from a file; empty if a step may have had them."""
        betas = [value for name, value in options._asdict().items() if name.startswith("beta")]
        return "" if min(options) >= 0 and all(beta < 1 for beta in betas) else str(options)

    def check_switches(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError if a param group asks for another rule."""
        kind = type(self).__name__
        for name, other in self.switches.items():
            value = group.get(name)
            if value is not None and name in _FLAGS:
                check_flag(name, value)
            if value:
                raise ValueError(
                    f"{name}={value!r} of torch.optim.{_of_pytorch(kind)} is not supported: it is another rule, "
                    f"ZenFlow(params, {other}(...)) of zenflow_compile.rules; pass that (under run, "
                    f"--keep-others); use {name}={type(value)()!r}"
                )
        given = group.get("decoupled_weight_decay")
        if given is None or self.decoupled in (None, given) or group["weight_decay"] == 0:
            return
        if self.decoupled:
            raise ValueError(
                f"decoupled_weight_decay={given!r} is torch.optim.Adam's, whose weight decay is part of the gradient, "
                "and this optimizer decays as AdamW does: leave it out, or set weight_decay=0"
            )
        raise ValueError(
            f"decoupled_weight_decay={given!r} is torch.optim.AdamW's, and the weight decay of {kind} is part of the "
            "gradient: use the rule AdamW, or set weight_decay=0"
        )

    @abstractmethod
    def gradient_numbers(self, options: Any, count: int) -> tuple[float, ...]:
        """The numbers ``of_gradient``, in double precision.

        Args:
            options: of the optimizer step that used the gradient.
            count: gradients in the state with this one.
        """

    @abstractmethod
    def window_numbers(self, options: Sequence[Any], count: int) -> tuple[float, ...]:
        """The numbers ``of_window``, in double precision.

        Args:
            options: of each gradient's optimizer step, oldest first; at least one.
            count: gradients in the state after the window.
        """

    @abstractmethod
    def accumulate(self, weight: Any, state: Any, gradient: Any, c: Any) -> tuple[Any, ...]:
        """Return the new values of ``arrays`` and ``window``, in this order, of their old ones and a gradient.

        Args:
            weight: tensor of fp32 numbers.
            state: has the old values by name.
            gradient: fp32, scaled.
            c: has the numbers ``of_gradient`` by name.
        """

    @abstractmethod
    def apply(self, weight: Any, state: Any, c: Any) -> Any:
        """Return the new weight; ``c`` has the numbers ``of_window``."""

    def on_matrices(self, values: Any, options: Any) -> Any:
        """Return new values ``of_matrix``, of matrices [matrices, rows, columns]; ``values`` are not written."""
        return values

    def matrix_flops(self, rows: int, columns: int) -> float:
        """FLOPs of ``on_matrices`` for one of them."""
        return 0.0

    def stable_share(self, momentum: float, steps: int) -> float:
        """Share of its largest stable rate that update windows leave, on a quadratic; 1 if rates are not bounded so."""
        return 1.0

    @property
    def values(self) -> tuple[str, ...]:
        """Names of what ``state`` has."""
        return (*(array.name for array in self.arrays), *self.window)


_RESERVED = frozenset(("params", "rule", "maximize", "param_names"))
_FLAGS = ("amsgrad", "nesterov", "centered")


def _of_pytorch(kind: str) -> str:
    """The optimizer of PyTorch that a rule is a version of."""
    return next((name for name in ("AdamW", "RMSprop", "SGD") if name in kind), kind)


def _tuple_of(name: str, fields: Sequence[str]) -> Any:
    return namedtuple(name, fields)


def decay_of(options: Sequence[Any]) -> float:
    """What is left of a weight that each of the steps decays by its rate (AdamW, Algorithm 2, line 12)."""
    return float(math.prod(1.0 - each.lr * each.weight_decay for each in options))


def rate_of(options: Sequence[Any]) -> float:
    """The rates of all steps together."""
    return math.fsum(each.lr for each in options)


def check_betas(betas: Any) -> tuple[float, float]:
    """Two numbers in [0, 1); ValueError if ``betas`` are not."""
    allowed = "two numbers in [0, 1), such as (0.9, 0.999)"
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas={betas!r} must be {allowed}")
    first, second = (check_number(f"betas[{place}]", beta, 0.0, 1.0) for place, beta in enumerate(betas))
    if 1.0 in (first, second):
        raise ValueError(f"betas={betas!r} must be {allowed}")
    return first, second


def plain(name: str, value: Any, read: Callable[[Tensor], Tensor] = lambda tensor: tensor.cpu()) -> Any:
    """A group's value with numbers in place of tensors of one element, which ``read`` copies to the host.

    Raises:
        ValueError: a tensor of more elements, or a tensor next to a number.
    """
    if isinstance(value, (tuple, list)):
        if len({_is_tensor(each) for each in value}) > 1:
            raise ValueError(f"{name}={value!r} must be numbers, both of them floats or both tensors")
        return tuple(plain(f"{name}[{place}]", each, read) for place, each in enumerate(value))
    if not _is_tensor(value):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name} is a tensor of {value.numel()} elements; it must be a number, or a tensor of one")
    if value.is_meta:
        raise ValueError(f"{name} is a tensor on the meta device, which has no value; pass a number")
    return read(value).item()


def _is_tensor(value: object) -> bool:
    return hasattr(value, "numel")  # predictions read rules without importing PyTorch


def counted(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An entry of an optimizer of PyTorch that counts no steps: its array ``name`` is there, or not zero, after one."""
    if name not in entry or float(entry.get("step", 0.0)) or ("step" in entry and not bool(entry[name].any())):
        return entry
    return {**entry, "step": 1.0}


def named(names: Sequence[str], values: Sequence[Any]) -> Any:
    """An object with ``values`` by name."""
    return SimpleNamespace(**dict(zip(names, values, strict=True)))
