"""Checks values that users pass, makes text printable, and finds the user's line.

Every error of a check names the option, the value, the allowed values, and a remedy.

A wrong type raises ``TypeError``, a wrong value ``ValueError``. A ``bool`` is not a number here; NaN is in no range.
Numbers, also NumPy's, are returned as plain ``int`` and ``float``, which ``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

LARGEST_INTEGER = 2**63 - 1
"""Larger integers do not fit into a tensor, and so not into a state dict."""


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
    return check_number(name, value, 0.0, 1.0)


def usable_cores() -> list[int]:
    """The logical cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def check_cores(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as logical cores that this process may use, without duplicates."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} must be a list of core numbers, such as [2, 3], or None")
    cores = tuple(check_integer(f"{name}[{index}]", core, 0) for index, core in enumerate(value))
    usable = usable_cores()
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
        raise ValueError(f"{name}={shown(value)} must be {allowed}")
    return number


def check_number(name: str, value: Any, at_least: float, at_most: float, *, remedy: str = "") -> float:
    """``value`` as a float in [at_least, at_most]. ``remedy`` ends the message, with its own punctuation."""
    number = _as_float(name, value, allowed := f"a number in [{at_least:g}, {at_most:g}]{remedy}")
    if not at_least <= number <= at_most:
        raise ValueError(f"{name}={shown(value)} must be {allowed}")
    return number


def check_integer(name: str, value: Any, at_least: int, at_most: int | None = None, *, remedy: str = "") -> int:
    """``value`` as an int in [at_least, at_most]. ``remedy`` ends the message, with its own punctuation."""
    allowed = f"an integer >= {at_least}" if at_most is None else f"an integer in [{at_least}, {at_most}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be {allowed}{remedy}; it is of type {type(value).__name__}")
    number = int(value)
    if number < at_least or (at_most is not None and number > at_most):
        raise ValueError(f"{name}={shown(number)} must be {allowed}{remedy}")
    if number > LARGEST_INTEGER:
        raise ValueError(f"{name}={shown(number)} must be at most 2**63 - 1, the largest integer of a tensor")
    return number


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean "x"?`` with the valid name nearest to ``name``, in any case; empty if none is."""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not near and len(name) > 2:  # difflib finds a prefix too far from the name: "topk" from "topk_ratio"
        near = [candidate for candidate in by_lower if candidate.startswith(name.lower())][:1]
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""


def unknown_option(name: object, valid: tuple[str, ...], *, where: str = "") -> TypeError:
    """The error for an option that does not exist: suggests the nearest valid one, or lists some.

    Args:
        name: what the user wrote.
        valid: all valid names, the likely ones first.
        where: the place of the name, as in ``" in the zenflow block of run.json"``.
    """
    remedy = nearest(str(name), valid) or f"; valid options are {', '.join(valid[:60])}"
    return TypeError(f"unknown option {name!r}{where}{remedy}")


def _as_float(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be {allowed}; it is of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:  # an integer beyond the floats
        raise ValueError(f"{name}={shown(value)} must be {allowed}") from error


def shown(value: Any) -> str:
    """``repr(value)`` for an error, shortened if it is very long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"(an integer of {int(value).bit_length()} bits)"
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text)} characters)"


def printable(text: object) -> str:
    r"""Return ``str(text)`` on one line, with every character that is not printable as an escape.

    Escape sequences of a terminal, C0 and C1 control characters, line breaks, bidirectional overrides and other
    invisible characters become ``\x1b``, ``\n``, ``\u202e`` and so on. Letters of every script stay as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def user_stacklevel() -> int:
    """The ``stacklevel`` with which the caller's ``warnings.warn`` names the first line outside this package and torch.

    It is no constant: options reach the compile backend through many frames of Dynamo.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("torch", "zenflow_compile"):
            return level
        frame = frame.f_back
        level += 1
    return 1
