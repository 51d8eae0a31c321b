"""``plan`` and ``simulate``: what offloading would do on given hardware, before anyone rents it.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zenflow_compile.options import POLICIES, Options
from zenflow_compile.planning import hardware as machines
from zenflow_compile.planning import models
from zenflow_compile.planning.auto import compare, recommended, resolve_stride
from zenflow_compile.planning.forecast import Forecast, forecast, node_plan
from zenflow_compile.planning.hardware import Hardware
from zenflow_compile.planning.models import ModelShape
from zenflow_compile.planning.simulate import simulate as simulate_plan
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.validate import check_choice, check_flag, check_integer, check_positive

SOME_DISK = "/path/on/a/local/disk"
"""Stands for ``nvme_path`` in a prediction, where nothing is written."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, checked: a run of ``model`` on ``hardware``.

    Attributes:
        hardware: with the devices and the memory that are in use.
        policy: one, or ``"auto"`` for all.
        options: of the run; under ``"auto"`` the knobs that all policies share.
        tokens: per device and step; epoch_tokens: of an epoch, over all devices.
    """

    model: ModelShape
    hardware: Hardware
    policy: str
    options: Options
    tokens: int
    recompute: bool
    epoch_tokens: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer: a forecast per policy, and the one to take; None if none fits."""

    question: Question
    forecasts: tuple[Forecast, ...]
    recommended: Forecast | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second."""
        asked = self.question
        return {
            "model": asked.model.name,
            "parameters": asked.model.numel,
            "hardware": asked.hardware.name,
            "devices": asked.hardware.devices,
            "tokens": asked.tokens,
            "policies": [each.as_dict() for each in self.forecasts],
            "recommended": None if self.recommended is None else self.recommended.options,
        }


def plan(
    model: str | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    devices: int | None = None,
    policy: str = "auto",
    recompute: bool = False,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Predict memory, time and traffic of every policy, and which is the fastest that fits.

    Args:
        model: a name, the path of a Hugging Face ``config.json``, or a shape.
        hardware: a name, or numbers.
        tokens: per device and step.
        devices: in use, of the node's; None takes all.
        policy: one, or ``"auto"`` for all.
        recompute: activations are computed again in the backward.
        epoch_tokens: of an epoch, over all devices, for its hours.
        device_bytes, host_bytes: memory of a device, of the node; None takes the hardware's.
        options: knobs of ``ZenFlowAdamW``.

    Returns:
        ``model``, ``parameters``, ``hardware``, ``devices``, ``tokens``; ``policies``, a dict per policy with the
        fields of ``planning.forecast.Forecast``; and ``recommended``, options to pass on, or None if nothing fits.

    Raises:
        TypeError: a value is of the wrong type, or an option is unknown.
        ValueError: a value is out of range, a name is unknown, or the hardware lacks a number.
    """
    asked = question(
        model,
        hardware,
        tokens=tokens,
        devices=devices,
        policy=policy,
        recompute=recompute,
        epoch_tokens=epoch_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        **options,
    )
    return predict(asked).as_dict()


def simulate(
    model: str | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    steps: int | None = None,
    devices: int | None = None,
    recompute: bool = False,
    **options: Any,
) -> Recording:
    """The timeline of a run, as the profiler would have recorded it.

    Args:
        steps: to record; None takes three windows, at least four steps.
        options: knobs of ``ZenFlowAdamW``, with a ``policy`` other than ``"auto"``. Others as for ``plan``, and so
            are the errors.
    """
    asked = question(model, hardware, tokens=tokens, devices=devices, recompute=recompute, **options)
    if asked.policy == "auto":
        raise ValueError('policy="auto" is not one policy to simulate; pass one, or the options that plan() recommends')
    return timeline(asked, resolve_stride(asked.options, asked.hardware), steps=steps)


def question(
    model: str | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int,
    devices: int | None = None,
    policy: str = "zenflow",
    recompute: bool = False,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    **options: Any,
) -> Question:
    """Check everything; arguments and errors as ``plan`` has them."""
    check_choice("policy", policy, POLICIES)
    if epoch_tokens is not None:
        check_positive("epoch_tokens", epoch_tokens)
    shape = _model(model) if isinstance(model, str) else model
    machine = machines.hardware(hardware) if isinstance(hardware, str) else hardware
    return Question(
        model=shape,
        hardware=_in_use(machine, devices, device_bytes, host_bytes),
        policy=policy,
        options=_options(policy, machine, options),
        tokens=check_integer("tokens", tokens, 1),
        recompute=check_flag("recompute", recompute),
        epoch_tokens=epoch_tokens,
    )


def predict(asked: Question) -> Prediction:
    """Answer; errors as ``plan`` has them, where the hardware lacks a number."""
    if asked.policy == "auto":
        forecasts = compare(
            asked.options,
            asked.hardware,
            asked.model,
            tokens=asked.tokens,
            recompute=asked.recompute,
            epoch_tokens=asked.epoch_tokens,
        )
    else:
        forecasts = [
            forecast(
                resolve_stride(asked.options, asked.hardware),
                asked.hardware,
                asked.model,
                tokens=asked.tokens,
                recompute=asked.recompute,
                epoch_tokens=asked.epoch_tokens,
            )
        ]
    return Prediction(asked, tuple(forecasts), recommended(forecasts))


def timeline(asked: Question, options: Options, *, steps: int | None = None) -> Recording:
    """The recording of a run with ``options``, whose stride is resolved."""
    return simulate_plan(
        node_plan(options, asked.hardware, asked.model),
        asked.hardware,
        asked.model,
        tokens=asked.tokens,
        steps=steps,
        final_at_step=options.max_grad_norm is not None,
        overlap=options.overlap_step,
        recompute=asked.recompute,
        workers=options.workers,
    )


def _model(name: str) -> ModelShape:
    """A named model; or one in a file, if the name looks like a path."""
    if Path(name).suffix == ".json" or Path(name).exists():
        return models.from_config(name)
    return models.model(name)


def _in_use(machine: Hardware, devices: int | None, device_bytes: float | None, host_bytes: float | None) -> Hardware:
    remedy = f": {machine.name!r} has no more; leave it at None to use all" if devices else ""
    count = machine.devices if devices is None else check_integer("devices", devices, 1, machine.devices, remedy=remedy)
    return replace(
        machine,
        devices=count,
        device_bytes=machine.device_bytes if device_bytes is None else check_positive("device_bytes", device_bytes),
        host_bytes=machine.host_bytes if host_bytes is None else check_positive("host_bytes", host_bytes),
    )


def _options(policy: str, machine: Hardware, options: dict[str, Any]) -> Options:
    named = dict(options)
    if policy != "auto":
        named["policy"] = policy
    in_files = policy in ("auto", "zero_infinity") or named.get("offload_device") == "nvme"
    if in_files and machine.disk_read is not None:
        named.setdefault("nvme_path", SOME_DISK)
    elif in_files and policy != "auto" and "nvme_path" not in named:
        what = f"policy={policy!r}" if policy == "zero_infinity" else "offload_device='nvme'"
        raise ValueError(
            f"hardware={machine.name!r} has no disk_read and disk_write, and {what} keeps state in files; choose "
            "hardware with a disk, or keep state in memory"
        )
    return Options.from_keywords(**named)
