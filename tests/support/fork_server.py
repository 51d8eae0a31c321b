"""Processes that begin with PyTorch imported: forks of a server that has done nothing else.

A spawned process imports for two seconds before its first line. Tests start hundreds of processes.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

# Hazard: the server must not run operators, start threads or touch an accelerator; forks would inherit broken pools.
_PRELOADED = [
    "pytest",
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "zenflow_compile.backend",
    "zenflow_compile.optimizer",
]


def fork_server() -> ForkServerContext:
    """The context whose processes are forks of the server. It starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def begin_process(environment: Mapping[str, str]) -> None:
    """Call this first in a fork.

    It takes over the environment, which is the server's, leaves imports to no collection, and prints where each thread
    is if the process dies of a signal.

    Args:
        environment: ``os.environ`` of the process that started this one.
    """
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()
    faulthandler.enable()
    from tests.support.compilation import measure_no_guards  # imports PyTorch

    measure_no_guards()
