"""Keeps work that PyTorch does for its logs alone out of each compilation."""

from __future__ import annotations

import logging

import torch._dynamo.guards


def measure_no_guards() -> None:
    """PyTorch flushes the processor's caches after each compilation, for 30 ms, to log how long its guards take."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def print_no_graphs() -> None:
    """Take pytest's handlers off the structured trace: with any handler, PyTorch and our passes print every graph."""
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True  # pytest adds its handlers to loggers that do not propagate
    trace.handlers.clear()
