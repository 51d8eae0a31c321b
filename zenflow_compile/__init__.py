"""Optimizer offloading as a graph rewrite: ``torch.compile(model, backend="zenflow")``."""

from zenflow_compile.clipping import clip_grad_norm_
from zenflow_compile.explain import explain
from zenflow_compile.optimizer import ZenFlowAdamW
from zenflow_compile.ownership import optimizer_of
from zenflow_compile.profiling.profiler import profile

__all__ = ["ZenFlowAdamW", "clip_grad_norm_", "explain", "optimizer_of", "profile"]
