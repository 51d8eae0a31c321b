"""Checks of values that users pass. Every error names the option, the value, what is allowed, and a remedy.

Wrong kind: ``TypeError``; wrong value: ``ValueError``. A ``bool`` is not a number here, and NaN is in no
range. Accepted numbers, NumPy's too, come back as plain ``int`` and ``float``:
``torch.load(weights_only=True)`` reads those.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any

# What torch.optim.AdamW takes and we do not. The reason helps more than the nearest valid name would.
_TORCH_ADAMW_ONLY = {
    "amsgrad": "the maximum of past second moments is not kept; drop it",
    "maximize": "negate the loss instead",
    "foreach": "the update is already fused; drop it",
    "fused": "the update is already fused; drop it",
    "capturable": "CUDA graphs are not supported in this version; drop it",
    "differentiable": "the update happens outside autograd; drop it",
}


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """``value`` if it is one of ``allowed``; otherwise an error that suggests the nearest one."""
    listed = ", ".join(f'"{choice}"' for choice in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, one of {listed}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {listed}{nearest(value, allowed)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    return value


def check_ratio(name: str, value: Any) -> float:
    """``value`` as a float in [0, 1]."""
    number = _as_float(name, value, allowed := "a number in [0, 1]")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return number


def check_cores(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as logical cores that this process may use, none of them twice."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} must be a list of core numbers, such as [2, 3], or None")
    cores = tuple(check_integer(name, core, 0) for core in value)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    unusable = [core for core in cores if core not in usable]
    if unusable or not cores or len(set(cores)) < len(cores):
        raise ValueError(
            f"{name}={list(cores)} must name at least one core, each once, of those this process may use: {usable}; "
            "leave it at None to have them chosen"
        )
    return cores


def check_positive(name: str, value: Any, *, remedy: str = "") -> float:
    """``value`` as a finite float above 0. ``remedy`` ends the message, with its own punctuation."""
    number = _as_float(name, value, allowed := f"a finite number > 0{remedy}")
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return number


def check_number(name: str, value: Any, at_least: float) -> float:
    """``value`` as a finite float of at least ``at_least``."""
    number = _as_float(name, value, allowed := f"a finite number >= {at_least:g}")
    if not at_least <= number < math.inf:
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return number


def check_integer(
    name: str, value: Any, at_least: int, at_most: int | None = None, *, remedy: str = ""
) -> int:
    """``value`` as an int in [at_least, at_most]. ``remedy`` ends the message, with its own punctuation."""
    allowed = f"an integer >= {at_least}" if at_most is None else f"an integer in [{at_least}, {at_most}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be {allowed}{remedy}; it is of type {type(value).__name__}")
    number = int(value)
    if number < at_least or (at_most is not None and number > at_most):
        raise ValueError(f"{name}={number} must be {allowed}{remedy}")
    return number


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean "x"?`` with the valid name nearest to ``name``, in any case; empty if none is."""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not near and len(name) > 2:  # a cut-off name is far from the whole one, as "topk" from "topk_ratio"
        near = [candidate for candidate in by_lower if candidate.startswith(name.lower())][:1]
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def unknown_option(name: object, valid: tuple[str, ...], *, where: str = "") -> TypeError:
    """The error for an option that does not exist: suggests the nearest valid one, or lists some.

    Args:
        name: what the user wrote.
        valid: every name that would be right there, the likely ones first.
        where: the place, as in ``" in the zenflow block of run.json"``.
    """
    if isinstance(name, str) and name in _TORCH_ADAMW_ONLY:
        reason = _TORCH_ADAMW_ONLY[name]
        return TypeError(f'option "{name}"{where} of torch.optim.AdamW is not supported: {reason}')
    remedy = nearest(str(name), valid) or f"; valid options are {', '.join(valid[:40])}"
    return TypeError(f"unknown option {name!r}{where}{remedy}")


def _as_float(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be {allowed}; it is of type {type(value).__name__}")
    return float(value)
