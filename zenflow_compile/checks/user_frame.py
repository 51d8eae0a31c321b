"""Finds the line of user code that a warning should name."""

from __future__ import annotations

import sys
from types import FrameType


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
