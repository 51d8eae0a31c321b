"""Predicts step times on this machine with the simulator, from rates measured here and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from benchmarks.systems.workloads import DTYPES, WORKLOADS
from zenflow_compile.cli.doctor import measure
from zenflow_compile.measure import bandwidth
from zenflow_compile.measure.disk import disk_rates
from zenflow_compile.options.options import Options
from zenflow_compile.performance.equations import stride_of, update_stride
from zenflow_compile.performance.hardware import Hardware, hardware_of
from zenflow_compile.performance.model_shape import ModelShape, flops_per_token
from zenflow_compile.planning.planners import ParamSpec, make_plan
from zenflow_compile.prediction.forecast import stride_rates
from zenflow_compile.prediction.simulate import simulate
from zenflow_compile.profiling.summary import summarize
from zenflow_compile.runtime.host.cgroups import cpu_quota
from zenflow_compile.runtime.host.cores import physical_cores, worker_count

_ROUNDS = 5


class Prediction(NamedTuple):
    """Times of one step, in ms; ``host_update_ms`` is the workers' busy time."""

    step_ms: float
    stall_ms: float
    host_update_ms: float


@dataclass(frozen=True, slots=True)
class Predictor:
    """A machine as it was measured, and a model that trains on it."""

    hardware: Hardware
    shape: ModelShape
    tokens: int

    @classmethod
    def measure(cls, model: str, *, threads: int, directory: str, dtype: str = "fp32") -> Predictor:
        """What ``doctor`` measures; how fast the device computes ``model`` is told by ``computing``.

        Args:
            model: one of ``WORKLOADS``; threads: intra-op threads of the training.
            directory: on the disk that state in files will be on.
        """
        counts = sorted({1, len(physical_cores())})
        before = torch.get_num_threads()
        torch.set_num_threads(threads)  # which the device is made of
        try:
            found = measure(
                torch.device("cpu"),
                counts,
                bandwidth.default_bytes(),
                _ROUNDS,
                disk_rates(directory),
                dtype=DTYPES[dtype],
            )
        finally:
            torch.set_num_threads(before)
        return cls.of(asdict(found), model, threads=threads, dtype=dtype)

    @classmethod
    def of(
        cls, findings: Mapping[str, Any], model: str, *, threads: int, dtype: str, tokens: int | None = None
    ) -> Predictor:
        """The machine of ``findings``, an output of ``zenflow-compile doctor --json``.

        Args:
            model: one of ``WORKLOADS``; tokens: per step, None for the workload's.
            threads: intra-op threads of the training, which are the device if that is the CPU.
        """
        on_cpu = findings["machine"]["device"] == "cpu"
        # Doctor does not measure the memory of a GPU.
        device_bytes = None if on_cpu else torch.cuda.get_device_properties(0).total_memory
        hardware = hardware_of(findings, device_bytes=device_bytes)
        if on_cpu:
            hardware = replace(hardware, device_cores=threads)
        return cls(hardware, shape_of(model, dtype), tokens_of(model) if tokens is None else tokens)

    def computing(self, seconds: float) -> Predictor:
        """The same machine, on which a forward and backward takes ``seconds``."""
        flops = step_flops(self.shape, self.tokens)
        return replace(self, hardware=replace(self.hardware, device_flops=flops / seconds))

    def predict(self, policy: str, options: Mapping[str, Any]) -> Prediction:
        """Simulate ``policy`` with ``options``."""
        checked = Options.from_keywords(policy=policy, **options)
        plan = make_plan(self.shape.params, checked)
        workers = worker_count(self.hardware.cores, cpu_quota(), checked.threads(self.hardware.cores))
        # With an optimizer object gradients are final in step(), as they are where something is clipped.
        recording = simulate(plan, self.hardware, self.shape, tokens=self.tokens, workers=workers, final_at_step=True)
        summary = summarize(recording)
        return Prediction(
            step_ms=summary["step_ms"] or 0.0,
            stall_ms=summary["stall_ms_per_step"] or 0.0,
            host_update_ms=summary["host_update_ms_per_step"] or 0.0,
        )

    def stride(self) -> tuple[float, int]:
        """The model's ratio of updates on the host to those on the device, and the stride that comes of it."""
        ratio = update_stride(**stride_rates(self.hardware))
        return ratio, stride_of(ratio)

    def described(self) -> dict[str, Any]:
        """The machine, for a results file."""
        return {name: value for name, value in asdict(self.hardware).items() if name != "sources"}


def shape_of(model: str, dtype: str) -> ModelShape:
    """The parameters of a workload, as planning sees them."""
    workload = WORKLOADS[model]
    with torch.device("meta"):  # shapes alone: a model of billions of parameters takes minutes to initialize
        named = list(workload.build().named_parameters())
    specs = tuple(ParamSpec(name, tuple(param.shape), DTYPES[dtype]) for name, param in named)
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    return ModelShape(
        name=model,
        params=specs,
        layers=len(matrices),
        hidden=max(min(spec.shape) for spec in matrices),
        context=workload.context or 1,
        source="the workload's own parameters",
    )


def tokens_of(model: str) -> int:
    """Rows that go through every matrix in a step."""
    workload = WORKLOADS[model]
    return workload.rows * max(1, workload.context)


def step_flops(shape: ModelShape, tokens: int) -> float:
    """FLOPs of a step's forward and backward."""
    return flops_per_token(shape, shape.context) * tokens
