"""The host that a test wants: its memory, cores and file systems, and what has launched its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from zenflow_compile.runtime.host import arena, cores
from zenflow_compile.runtime.host.cores import Core
from zenflow_compile.runtime.nvme import state_file
from zenflow_compile.runtime.parameters import capacity

FOUR_CORES = tuple(Core(logical) for logical in range(4))
_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID")


def host_memory(available: int, source: str = "the machine", *, read_by: Any = arena) -> Any:
    """Let the host have so many bytes that engines may take, or that another module reads."""
    return mock.patch.object(read_by, "available_host_memory", mock.Mock(return_value=(available, source)))


def no_direct_io() -> Any:
    """Let the file systems of files that are made have no direct I/O."""
    return mock.patch.object(state_file, "_open_direct", return_value=None)


@contextmanager
def four_cores(usable: Sequence[int] = range(4)) -> Iterator[None]:
    """Let the host have ``FOUR_CORES``, of which this process may use some."""
    with (
        mock.patch.object(capacity, "physical_cores", return_value=FOUR_CORES),
        mock.patch.object(os, "cpu_count", return_value=len(FOUR_CORES)),
        mock.patch.object(cores, "usable_cores", return_value=[*usable]),
    ):
        yield


def torchrun(rank: str, size: str | None) -> dict[str, str]:
    """What torchrun tells a process."""
    return {"LOCAL_RANK": rank} | ({} if size is None else {"LOCAL_WORLD_SIZE": size})


def srun(tasks: str, node: str, local: str) -> dict[str, str]:
    """What SLURM tells a process."""
    return {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": local}


@contextmanager
def launched_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Let launchers have told this process nothing else."""
    with mock.patch.dict(os.environ):
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        yield
