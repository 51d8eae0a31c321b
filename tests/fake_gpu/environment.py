"""Runs programs on the fake GPU, in the environment that ``make fake-gpu`` makes, and reads what they called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[2]
PATH_OF_ENVIRONMENT = "ZENFLOW_COMPILE_FAKE_GPU"
"""The variable with the environment's path, for tests that run in another checkout."""

ENVIRONMENT = Path(os.environ.get(PATH_OF_ENVIRONMENT, ROOT / ".venv-fake-gpu")).resolve()
PYTHON = ENVIRONMENT / "bin" / "python"
LIBRARIES = ENVIRONMENT / "fake_gpu" / "lib"
_SITE = Path(__file__).parent / "site"


def missing() -> str | None:
    """Why nothing can run on it; None if it can."""
    if (LIBRARIES / "libfakegpuoperators.so").exists():
        return None
    return "there is no fake GPU: `make fake-gpu` builds it (it downloads 0.8 GB)"


on_fake_gpu = [pytest.mark.long(40), pytest.mark.skipif(missing() is not None, reason=str(missing()))]
"""Marks of tests that need it."""


def run(
    arguments: Sequence[str],
    *,
    computes: bool = True,
    triton: Literal["off", "interpret", "launch"] = "off",
    switches: dict[str, str] | None = None,
    without: Sequence[str] = (),
    folder: Path = ROOT,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments``; the result has stdout and stderr together.

    Args:
        computes: operators of PyTorch have right numbers. Without it all device memory stays zero.
        triton: "off": as if it were not installed. "interpret": kernels compute in its interpreter, which reads device
            memory and so waits. "launch": kernels are compiled, loaded and launched, and compute nothing.
        switches: of ``csrc/device.h``, without "FAKE_GPU_".
        without: modules that are as if they were not installed.
        folder: the working directory, a checkout.
        timeout: in seconds.
    """
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        "PYTHONPATH": f"{_SITE}{os.pathsep}{folder}",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "FAKE_GPU_OPERATORS": "1" if computes else "0",
        "FAKE_GPU_WRITES": "1" if computes else "0",
        "FAKE_GPU_TRITON": triton,
        "FAKE_GPU_WITHOUT": ",".join(without),
        "TRITON_INTERPRET": "1" if triton == "interpret" else "0",
    }
    environment |= {f"FAKE_GPU_{name}": value for name, value in (switches or {}).items()}
    return subprocess.run(
        [str(PYTHON), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass(frozen=True)
class Call:
    """Calls of one function of the driver or the runtime, by one thread.

    Attributes:
        name: of the function; "kernel" for launches, whose kind is the kernel's name.
        kind: of a copy its direction, such as "D2H" or "H2D pageable"; "blocked" or "blocked with the GIL" for calls
            that waited; "stub" for libraries that are not there.
        thread: of the process.
        calls, bytes: of all of them.
    """

    name: str
    kind: str
    thread: str
    calls: int
    bytes: int


def read_calls(path: Path) -> list[Call]:
    """What ``fake_gpu_write_counts`` wrote."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return [Call(name, kind, thread, int(calls), int(size)) for name, kind, thread, calls, size in rows]


def count(calls: Iterable[Call], name: str, kind: str | None = None) -> int:
    """How often a function was called; of one kind, if it is given."""
    return sum(each.calls for each in calls if each.name == name and kind in (None, each.kind))
