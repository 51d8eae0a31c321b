"""Optimizer offloading as a graph rewrite: ``torch.compile(model, backend="zenflow")``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zenflow_compile import entry_point

if TYPE_CHECKING:
    from zenflow_compile.compiler.ownership import optimizer_of
    from zenflow_compile.explanation import explain
    from zenflow_compile.optimizer import ZenFlow, ZenFlowAdamW
    from zenflow_compile.options.deepspeed import read_deepspeed_config
    from zenflow_compile.prediction.predict import plan, simulate
    from zenflow_compile.profiling.compare import compare
    from zenflow_compile.profiling.live import live
    from zenflow_compile.profiling.profiler import Profile, profile
    from zenflow_compile.runtime.parameters.moved_weights import move_to_device

__all__ = [
    "Profile",
    "ZenFlow",
    "ZenFlowAdamW",
    "compare",
    "explain",
    "live",
    "move_to_device",
    "optimizer_of",
    "plan",
    "profile",
    "read_deepspeed_config",
    "simulate",
]

_MODULES = {
    "Profile": "profiling.profiler",
    "ZenFlow": "optimizer",
    "ZenFlowAdamW": "optimizer",
    "compare": "profiling.compare",
    "explain": "explanation",
    "live": "profiling.live",
    "move_to_device": "runtime.parameters.moved_weights",
    "optimizer_of": "compiler.ownership",
    "plan": "prediction.predict",
    "profile": "profiling.profiler",
    "read_deepspeed_config": "options.deepspeed",
    "simulate": "prediction.predict",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: most of it needs torch, which takes seconds to import, and planning does not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


entry_point.announce()
