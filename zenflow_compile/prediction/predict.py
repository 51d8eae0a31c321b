"""``plan`` and ``simulate``: what offloading would do on given hardware, before anyone rents it.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.models import ModelShape
from zenflow_compile.planning.planners import stride_weight_bytes
from zenflow_compile.prediction.auto_policy import compare, recommended, resolve_stride
from zenflow_compile.prediction.forecast import Forecast, final_at_step, forecast, node_plan
from zenflow_compile.prediction.scenario import SOME_DISK, Scenario, question
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.simulator.simulate import simulate as simulate_plan


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer: a forecast per policy, and the one to take; None if none fits."""

    question: Scenario
    forecasts: tuple[Forecast, ...]
    recommended: Forecast | None

    @property
    def shown(self) -> Forecast:
        """What is broken down, explained and traced: the recommended one, or the one that comes nearest to fitting."""
        return self.recommended or min(self.forecasts, key=lambda each: each.missing_bytes)

    @property
    def exactness(self) -> str | None:
        """In which way the recommended run differs from AdamW; None where it does not."""
        best = self.recommended
        if best is None or best.policy != "zenflow" or not best.traffic:
            return None
        options = Options.from_keywords(**best.options)
        most = "up to " if options.update_interval == "auto" else ""
        window = f"once per window of {most}{options.longest_window} steps"
        departures = (
            (options.longest_window > 1, window, "update_interval=1"),
            (options.staleness > 0, "a step late", "staleness=0"),
            (options.gradient_compression is not None, "by rounded gradients", "gradient_compression=None"),
        )
        ways = ", ".join(how for departs, how, _ in departures if departs)
        remedies = " and ".join(remedy for departs, _, remedy in departures if departs)
        return f"Not exactly AdamW: what is not selected is updated {ways}. Exact with {remedies}." if ways else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second. Options name no directory that was not given."""
        asked = self.question
        best = self.recommended
        notes = [asked.note, self.exactness]
        if best is not None and best.options.get("nvme_path") == SOME_DISK:
            notes.append("nvme_path has to be added to the recommended options: a directory on a local disk.")
        return {
            "model": asked.model.name,
            "parameters": asked.model.numel,
            "dtype": asked.dtype,
            "hardware": asked.hardware.name,
            "devices": asked.hardware.devices,
            "tokens": asked.tokens,
            "sequence": asked.model.context,
            "implicit": asked.implicit,
            "policies": [each.as_dict() | {"options": _given(each.options)} for each in self.forecasts],
            "recommended": None if best is None else _given(best.options),
            "notes": [note for note in notes if note is not None],
        }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the directory that stands for one."""
    return {name: value for name, value in options.items() if (name, value) != ("nvme_path", SOME_DISK)}


def plan(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    policy: str = "auto",
    implicit: bool = False,
    recompute: bool = False,
    epoch_tokens: float | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Predict memory, time and traffic of every policy, and which is the fastest that fits.

    Args:
        model: a name, the path of a Hugging Face ``config.json``, a number of parameters, or a shape.
        hardware: a name, or numbers.
        tokens: per device and step.
        sequence: of them, those of a sequence, which attention runs over; None takes the model's context, or all
            ``tokens`` where these are fewer.
        dtype: of the weights, ``"bf16"``, ``"fp16"`` or ``"fp32"``; None takes the model's own, bf16 where it has none.
        devices: in use, of the node's; None takes all. Of several each owns an equal share of the optimizer state,
            which this version predicts and does not run.
        policy: one, or ``"auto"`` for all.
        implicit: the update runs in the backward, as without an optimizer object; else gradients are final at
            ``step()``, which leaves the host the next forward. ``max_grad_norm`` makes both alike.
        recompute: activations are computed again in the backward.
        epoch_tokens: of an epoch, over all devices, for its hours.
        device_bytes, host_bytes: memory of a device, of the node; None takes the hardware's.
        options: knobs of ``ZenFlowAdamW``.

    Returns:
        ``model``, ``parameters``, ``dtype``, ``hardware``, ``devices``, ``tokens``, ``sequence``, ``implicit``;
        ``policies``, a dict per policy with the fields of ``planning.forecast.Forecast``; ``recommended``, options to
        pass on, or None if nothing fits; and ``notes``, sentences on what the recommended run is not, or still needs.

    Raises:
        TypeError: a value is of the wrong type, or an option is unknown.
        ValueError: a value is out of range, a name is unknown, or the hardware lacks a number.
    """
    asked = question(
        model,
        hardware,
        tokens=tokens,
        sequence=sequence,
        dtype=dtype,
        devices=devices,
        policy=policy,
        implicit=implicit,
        recompute=recompute,
        epoch_tokens=epoch_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        **options,
    )
    return predict(asked).as_dict()


def simulate(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    steps: int | None = None,
    devices: int | None = None,
    implicit: bool = False,
    recompute: bool = False,
    **options: Any,
) -> Recording:
    """The timeline of a run, as the profiler would have recorded it.

    Args:
        steps: to record; None takes three windows, at least four steps.
        options: knobs of ``ZenFlowAdamW``, with a ``policy`` other than ``"auto"``. Others as for ``plan``, and so
            are the errors.
    """
    asked = question(
        model,
        hardware,
        tokens=tokens,
        sequence=sequence,
        dtype=dtype,
        devices=devices,
        implicit=implicit,
        recompute=recompute,
        **options,
    )
    if asked.policy == "auto":
        raise ValueError('policy="auto" is not one policy to simulate; pass one, or the options that plan() recommends')
    return timeline(asked, _resolved(asked), steps=steps)


def predict(asked: Scenario) -> Prediction:
    """Answer; errors as ``plan`` has them, where the hardware lacks a number."""
    if asked.policy == "auto":
        forecasts = compare(
            asked.options,
            asked.hardware,
            asked.model,
            tokens=asked.tokens,
            implicit=asked.implicit,
            recompute=asked.recompute,
            epoch_tokens=asked.epoch_tokens,
        )
    else:
        forecasts = [
            forecast(
                _resolved(asked),
                asked.hardware,
                asked.model,
                tokens=asked.tokens,
                implicit=asked.implicit,
                recompute=asked.recompute,
                epoch_tokens=asked.epoch_tokens,
            )
        ]
    return Prediction(asked, tuple(forecasts), recommended(forecasts))


def _resolved(asked: Scenario) -> Options:
    weight_bytes = stride_weight_bytes(asked.model.params)
    return resolve_stride(asked.options, asked.hardware, weight_bytes=weight_bytes)


def timeline(asked: Scenario, options: Options, *, steps: int | None = None) -> Recording:
    """The recording of a run with ``options``, whose stride is resolved."""
    return simulate_plan(
        node_plan(options, asked.hardware, asked.model),
        asked.hardware,
        asked.model,
        tokens=asked.tokens,
        steps=steps,
        final_at_step=final_at_step(options, implicit=asked.implicit),
        overlap=options.overlap_step,
        recompute=asked.recompute,
        workers=options.workers,
    )
