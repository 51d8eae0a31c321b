"""Traces steps with CUPTI, and measures what ``zf.profile()`` costs."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import zenflow_compile as zf
from benchmarks.common import Spread, interleaved, ratios
from benchmarks.evidence.loop import WARM_UP, Loop
from benchmarks.evidence.setting import Emit, Setting
from zenflow_compile.profiling.recording import Intervals, intersect, length_ns, union

_TRACES = 4  # whole update windows: steps of one window differ
_COMPUTE = ("kernel", "gpu_memset")
_COPY = "gpu_memcpy"
_MARKER = "spin_kernel"  # of torch.cuda._sleep
_DIRECTIONS = {"to_host": "DtoH", "to_device": "HtoD", "on_device": "DtoD"}


def summarize(trace: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a Chrome trace of CUDA activities, in ms, between its first and last marker (``_mark``).

    Returns:
        ``busy_stream_N`` per stream; ``compute`` and ``copy_DIRECTION``: time in which any such activity runs;
        ``copy_DIRECTION_overlapped``: the part of it in which kernels run; ``span``: between the markers; ``idle``: the
        part of it without kernels and copies; and ``copy_DIRECTION_bytes``, a number of bytes, of the copies that start
        between the markers. Empty without markers.
    """
    events = [
        event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in (*_COMPUTE, _COPY)
    ]
    marks = _times(event for event in events if _MARKER in event["name"])
    if len(marks) < 2:
        return {}
    window = [(marks[0][1], marks[-1][0])]
    found: dict[str, float] = {}
    for stream in sorted({event["args"]["stream"] for event in events}):
        on_stream = _times(event for event in events if event["args"]["stream"] == stream)
        found[f"busy_stream_{stream}"] = _ms(intersect(on_stream, window))
    compute = intersect(_times(event for event in events if event["cat"] in _COMPUTE), window)
    found["compute"] = _ms(compute)
    for direction, name in _DIRECTIONS.items():
        copies = [event for event in events if event["cat"] == _COPY and name in event["name"]]
        busy = intersect(_times(copies), window)
        found[f"copy_{direction}"] = _ms(busy)
        found[f"copy_{direction}_overlapped"] = _ms(intersect(busy, compute))
        starting = (event for event in copies if window[0][0] <= round(event["ts"] * 1e3) < window[0][1])
        found[f"copy_{direction}_bytes"] = sum(event["args"].get("bytes", 0) for event in starting)
    found["span"] = _ms(window)
    found["idle"] = found["span"] - _ms(intersect(_times(events), window))
    return found


def _times(events: Iterable[Mapping[str, Any]]) -> Intervals:
    """Chrome's times are microseconds with decimals."""
    return union((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)) for event in events)


def _ms(intervals: Intervals) -> float:
    return length_ns(intervals) / 1e6


def measure_trace(setting: Setting, emit: Emit) -> None:
    """Trace single steps of one update window; the last trace stays as ``trace_step.json.gz``."""
    path = setting.folder / "trace_step.json.gz"
    with Loop(setting) as loop:
        loop.steps(WARM_UP)
        _traced(loop, path)  # the first trace includes the start of CUPTI
        found = [_traced(loop, path) for _ in range(_TRACES)]
        row = {"what": "traces of single steps", **loop.described(), "traces": len(found), "file": path.name}
    if not all(found):
        emit({**row, "left_out": "busy time and overlap: CUPTI needs a CUDA device"})
        return
    spreads = {name: Spread.of(values).row() for name, values in _columns(found).items()}
    emit({**row, "ms": {name: spread for name, spread in spreads.items() if not name.endswith("_bytes")}})
    emit(
        {
            "what": "copies in single steps",
            "bytes": {name: spread for name, spread in spreads.items() if name.endswith("_bytes")},
            "share_overlapped_with_compute": {
                direction: Spread.of(shares).row() for direction, shares in overlapped(found).items()
            },
        }
    )


def overlapped(found: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Share of each direction's copy time in which kernels run, per trace that has such copies."""
    shares: dict[str, list[float]] = {}
    for each in found:
        for direction in _DIRECTIONS:
            if busy := each[f"copy_{direction}"]:
                shares.setdefault(direction, []).append(each[f"copy_{direction}_overlapped"] / busy)
    return shares


def _columns(found: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Values by name; a stream that a step does not use was busy for no time."""
    names = sorted({name for each in found for name in each})
    return {name: [each.get(name, 0.0) for each in found] for name in names}


def _traced(loop: Loop, path: Path) -> dict[str, float]:
    """Trace three steps, of which the middle one is between markers, and write the trace to ``path``.

    A step that began on an idle device would have no uploads of the step before.
    """
    activity = ProfilerActivity.CUDA if loop.device.type == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        loop.step()
        _mark(loop.device)
        loop.step()
        _mark(loop.device)
        loop.step()
        loop.synchronize()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    text = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(text, mtime=0))
    return summarize(json.loads(text))


def _mark(device: torch.device) -> None:
    """Queue a kernel on the compute stream that no model uses; the CPU's trace has no streams to mark."""
    if device.type == "cuda":
        torch.cuda._sleep(1)


def measure_profiler(setting: Setting, emit: Emit) -> None:
    """Steps with and without ``zf.profile()``, in turns."""
    rounds, steps = (2, 2) if setting.tiny else (8, 4)
    with Loop(setting) as loop:
        loop.steps(WARM_UP)

        def turn(profiled: bool) -> float:
            """Mean step of one turn, ms; what the profiler does at its end is not a step."""
            with zf.profile(loop.optimizer) if profiled else nullcontext():
                loop.step()
                loop.synchronize()
                begin = time.perf_counter()
                loop.steps(steps)
                loop.synchronize()
                return (time.perf_counter() - begin) * 1e3 / steps

        times = interleaved(rounds, {"plain": partial(turn, False), "profiled": partial(turn, True)})
        emit(
            {
                "what": "zf.profile()",
                **loop.described(),
                "steps_of_a_turn": steps,
                "step_ms": Spread.of(times["plain"]).row(),
                "profiled_step_ms": Spread.of(times["profiled"]).row(),
                "profiled_over_plain": Spread.of(ratios(times["profiled"], times["plain"])).row(),
            }
        )
