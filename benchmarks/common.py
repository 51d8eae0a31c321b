"""What every benchmark says about itself: the machine it ran on, and its numbers as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The hardware and versions that numbers of this process belong to."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "hardware_threads": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_results(name: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Write ``rows`` and the machine to ``benchmarks/results/NAME.json`` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=2) + "\n")
    os.replace(unfinished, path)  # atomic: a benchmark that writes after every run may be cut off here
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
