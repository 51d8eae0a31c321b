"""Parts that measure systems next to what the simulator predicts for them: peers, strides, host updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import host_adam, policies
from benchmarks.evidence.loop import CLIP
from benchmarks.evidence.planned import device_bytes
from benchmarks.evidence.setting import Emit, Row, Setting
from benchmarks.evidence.turns import Turns, take_turns
from benchmarks.prediction import Predictor
from benchmarks.systems.case import OURS, Case
from benchmarks.systems.comparison import Schedule
from zenflow_compile.cli import doctor
from zenflow_compile.measure import bandwidth
from zenflow_compile.performance.equations import NEVER
from zenflow_compile.performance.hardware import HOST_PASS_BYTES, hardware_of
from zenflow_compile.runtime.host.cores import physical_cores

ALONE = "forward_backward"
_TINY = Schedule(warm_up=4, rounds=2, settle=1, steps=4, profile=4)
_TINY_BYTES = 2**22
_STRIDE_MODEL = "llama-1b"
_STRIDES = (1, 2, 3, 4)


def schedule_of(tokens: int, *, tiny: bool) -> Schedule:
    """Fewer rounds for longer steps, so that a part ends in time; turns of one update window."""
    if tiny:
        return _TINY
    rounds = {4096: 6, 8192: 5, 16384: 4}.get(tokens, 3)
    return Schedule(warm_up=8, rounds=rounds, settle=1, steps=4, profile=4)


def measure_machine(setting: Setting, emit: Emit) -> None:
    """What ``zenflow-compile doctor --json`` says, for one worker and for all."""
    counts = sorted({1, len(physical_cores())})
    size = _TINY_BYTES if setting.tiny else bandwidth.default_bytes()
    rounds = 1 if setting.tiny else 3
    found = doctor.measure(torch.device(setting.device), counts, size, rounds, None)
    emit(asdict(found))


def measure_peers(setting: Setting, emit: Emit, *, model: str, tokens: int, clip: bool, systems: Sequence[str]) -> None:
    """``systems`` in turns with a forward and backward alone and with resident AdamW."""
    of = partial(setting.case, model=model, tokens=tokens, clip=CLIP if clip else None)
    companions = {name: of(name) for name in (ALONE, "adamw")}
    found = []
    others = {name: of(name) for name in systems}
    memory = device_bytes(companions[ALONE])
    for turns in take_turns(companions, others, schedule_of(tokens, tiny=setting.tiny), memory_bytes=memory):
        emit(turns.row() | predicted(setting, turns))
        found.append(turns)
    _raise_for(found, others)


def measure_strides(setting: Setting, emit: Emit) -> None:
    """``deep_optimizer_states`` with every stride, Equation 1's among them, and without any update on the device."""
    of = partial(setting.case, model=_STRIDE_MODEL)
    equation: Row | None = None
    strides = set(_STRIDES[:1] if setting.tiny else _STRIDES)
    if setting.doctor is not None:
        ratio, stride = _predictor(setting, of(ALONE)).stride()
        # JSON knows no infinity: None is a link that is too slow for the device to update anything.
        equation = {"ratio": ratio if math.isfinite(ratio) else None, "stride": None if stride == NEVER else stride}
        strides |= {stride} - {NEVER}
    others: dict[str, Case] = {
        f"every {stride}. on the device": of("deep_optimizer_states", options={"update_stride": stride})
        for stride in sorted(strides)
    }
    others["none on the device"] = of("zero_offload")
    found = []
    memory = device_bytes(of(ALONE))
    for turns in take_turns({ALONE: of(ALONE)}, others, schedule_of(4096, tiny=setting.tiny), memory_bytes=memory):
        row = turns.row() | predicted(setting, turns)
        if turns.summary is not None:
            row["update_ms"] = policies.update_ms(turns.summary)
        stride_here = turns.case.options.get("update_stride")
        emit({**row, "stride": stride_here, "equation_1": equation})
        found.append(turns)
    _raise_for(found, others)


def measure_host_adam(setting: Setting, emit: Emit) -> None:
    """Host updates with 1 to 16 threads, one per physical core, next to the simulator's rate."""
    kernels = ("copy", "ours", "fused")
    numel, rounds = (2**16, 2) if setting.tiny else (2**25, 7)
    cores = len(physical_cores())
    for threads in range(1, 17):
        if threads > cores:
            emit({"threads": threads, "left_out": f"this process may use {cores} physical cores, one thread each"})
            continue
        for slots in (1, 4):
            rows, _ = host_adam.measure("bf16", slots, numel, threads, rounds, kernels, Path())
            for row in rows:
                emit(row | _predicted_rate(setting, row))


def predicted(setting: Setting, turns: Turns) -> Row:
    """The simulator's step next to the measured one.

    Its forward and backward take as long as they took alone in the same rounds; everything else is from doctor.
    """
    policy = "resident" if turns.name == "adamw" else turns.case.system
    alone = turns.companions_ms.get(ALONE)
    if policy not in OURS or turns.error is not None or setting.doctor is None or alone is None:
        return {"predicted": None}
    options: dict[str, Any] = dict(turns.case.options)
    if policy == "zenflow":
        options |= {"update_interval": turns.case.update_interval, "topk_ratio": turns.case.topk_ratio}
    said = _predictor(setting, turns.case).computing(median(alone) / 1e3).predict(policy, options)
    return {"predicted": said._asdict(), "predicted_over_measured": said.step_ms / median(turns.rounds_ms)}


def _predictor(setting: Setting, case: Case) -> Predictor:
    assert setting.doctor is not None
    return Predictor.of(setting.doctor, case.model, threads=case.threads, dtype=case.dtype, tokens=_tokens(case))


def _tokens(case: Case) -> int:
    workload = case.workload()
    return workload.rows * max(1, workload.context)


def _predicted_rate(setting: Setting, row: Mapping[str, Any]) -> Row:
    """The rate at which the simulator's workers update: that of all their cores, or of the memory."""
    if setting.doctor is None or "million_parameters_per_s" not in row:
        return {"predicted_million_parameters_per_s": None}
    findings = setting.doctor
    hardware = hardware_of(findings, device_bytes=findings["machine"]["memory_bytes"])  # the device takes no part
    rate = min(row["threads"] * hardware.adam_per_core * HOST_PASS_BYTES, hardware.host_bandwidth)
    million = rate / row["bytes_per_parameter"] / 1e6
    return {
        "predicted_million_parameters_per_s": float(f"{million:.4g}"),
        "predicted_over_measured": million / row["million_parameters_per_s"]["median"],
    }


def _raise_for(found: Sequence[Turns], asked: Collection[str]) -> None:
    """
    Raises:
        RuntimeError: after all rows are written: a system failed, or none of those that were asked for has a number.
    """
    if faulty := [turns.name for turns in found if turns.faulty]:
        raise RuntimeError(f"failed: {', '.join(faulty)}; their rows say why")
    if not any(turns.rounds_ms for turns in found if turns.name in asked):
        raise RuntimeError(f"no number of {', '.join(asked)}; their rows say why")
