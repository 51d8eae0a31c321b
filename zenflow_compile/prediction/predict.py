"""``plan`` and ``simulate``: predict a run on hardware that need not be there. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shapes import ModelShape
from zenflow_compile.performance.rank_traffic import Exchange, RankTraffic, rank_traffic
from zenflow_compile.prediction.auto_policy import compare, recommended, resolve_stride
from zenflow_compile.prediction.forecast import ROUNDED, Forecast, forecast, node_plan
from zenflow_compile.prediction.scenario import SOME_DISK, Scenario, scenario_of
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.simulator.simulate import simulate as simulate_plan


@dataclass(frozen=True, slots=True)
class Prediction:
    """A forecast per policy, and the recommended one; None if none fits."""

    scenario: Scenario
    forecasts: tuple[Forecast, ...]
    recommended: Forecast | None

    @property
    def shown(self) -> Forecast:
        """The forecast to break down, explain and trace: the recommended one, or the nearest to fitting."""
        return self.recommended or min(self.forecasts, key=lambda each: each.missing_bytes)

    @property
    def exchanges(self) -> dict[Exchange, RankTraffic]:
        """What the devices send with the options of ``shown``, by way of sharing the work; empty for one device."""
        devices = self.scenario.hardware.devices
        if devices == 1:
            return {}
        plan = node_plan(Options.from_keywords(**self.shown.options), self.scenario)
        return {exchange: rank_traffic(plan, devices, exchange) for exchange in Exchange}

    @property
    def exactness(self) -> str | None:
        """How the recommended run differs from AdamW, as a sentence; None if it does not."""
        found = {} if self.recommended is None else self.recommended.departures
        if not found:
            return None
        ways, remedies = ", ".join(found), " and ".join(found.values())
        what = "weights" if [*found] == [ROUNDED] else "deferred columns"
        return f"Not exactly AdamW: {what} are updated {ways}. Exact with {remedies}."

    def as_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds, tokens per second. Options have no ``nvme_path`` that the user did not give."""
        asked = self.scenario
        best = self.recommended
        weights = self.shown.weights
        notes = [asked.note, self.exactness, None if weights is None else weights.sentence]
        if best is not None and best.options.get("nvme_path") == SOME_DISK:
            notes.append("Add nvme_path to the recommended options: a directory on a local disk.")
        return {
            "model": asked.model.name,
            "parameters": asked.model.numel,
            "dtype": asked.dtype,
            "hardware": asked.hardware.name,
            "nodes": asked.hardware.nodes,
            "devices": asked.hardware.devices,
            "tokens": asked.tokens,
            "sequence": asked.model.context,
            "implicit": asked.in_backward,
            "policies": [each.as_dict() | {"options": _given(each.options)} for each in self.forecasts],
            "exchanges": {
                str(exchange): {"sent": each.sent, "to_host": each.to_host, "to_device": each.to_device}
                for exchange, each in self.exchanges.items()
            },
            "recommended": None if best is None else _given(best.options),
            "notes": [note for note in notes if note is not None],
        }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` without the ``nvme_path`` of predictions."""
    return {name: value for name, value in options.items() if (name, value) != ("nvme_path", SOME_DISK)}


def plan(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    nodes: int = 1,
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
        sequence: tokens of a sequence, which attention runs over; None takes the model's context, or all ``tokens``
            if these are fewer.
        dtype: of the weights, ``"bf16"``, ``"fp16"`` or ``"fp32"``; None takes the model's own, bf16 where it has none.
        devices: of a node, in use; None takes all. Each owns an equal share of the optimizer state.
        nodes: equal ones, connected by the hardware's ``network_bandwidth``.
        policy: one, or ``"auto"`` for all.
        implicit: updates run in the backward, without an optimizer object; else gradients are final at ``step()``,
            which leaves the host the next forward. With ``max_grad_norm`` they always are.
        recompute: activations are computed again in the backward.
        epoch_tokens: of an epoch, over all devices, for its hours.
        device_bytes, host_bytes: memory of a device, of a node; None takes the hardware's.
        options: of ``ZenFlowAdamW``. With ``gradient_accumulation_steps`` the tokens come in as many micro-batches.

    Returns:
        ``model``, ``parameters``, ``dtype``, ``hardware``, ``nodes``, ``devices`` of all nodes, ``tokens``,
        ``sequence``, ``implicit``; ``policies``, a dict per policy with the fields of ``prediction.forecast.Forecast``;
        ``exchanges``, bytes that a device sends per step by way of sharing the work, see
        ``performance.rank_traffic.Exchange``; ``recommended``, options to pass on, or None if no policy fits; and
        ``notes``, sentences on the recommended run, and on
        the weights that cross the link.

    Raises:
        TypeError: a value is of the wrong type, or an option is unknown.
        ValueError: a value is out of range, a name is unknown, or the hardware lacks a number.
    """
    scenario = scenario_of(
        model,
        hardware,
        tokens=tokens,
        sequence=sequence,
        dtype=dtype,
        devices=devices,
        nodes=nodes,
        policy=policy,
        implicit=implicit,
        recompute=recompute,
        epoch_tokens=epoch_tokens,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        **options,
    )
    return predict(scenario).as_dict()


def simulate(
    model: str | Path | float | ModelShape,
    hardware: str | Hardware,
    *,
    tokens: int = 8192,
    sequence: int | None = None,
    dtype: str | None = None,
    steps: int | None = None,
    devices: int | None = None,
    nodes: int = 1,
    implicit: bool = False,
    recompute: bool = False,
    **options: Any,
) -> Recording:
    """Predict the timeline of a run, in the form of a profiler's recording.

    Args:
        steps: to record; None takes three update windows, at least four steps.
        options: of ``ZenFlowAdamW``, with a ``policy`` other than ``"auto"``. Other arguments, and errors, as for
            ``plan``.
    """
    scenario = scenario_of(
        model,
        hardware,
        tokens=tokens,
        sequence=sequence,
        dtype=dtype,
        devices=devices,
        nodes=nodes,
        implicit=implicit,
        recompute=recompute,
        **options,
    )
    if scenario.policy == "auto":
        raise ValueError('policy="auto" is not one policy to simulate; pass one, or the options that plan() recommends')
    return timeline(scenario, _resolved(scenario), steps=steps)


def predict(scenario: Scenario) -> Prediction:
    """Forecast the policies of a scenario; raises ValueError as ``plan`` if the hardware lacks a number."""
    forecasts = compare(scenario) if scenario.policy == "auto" else [forecast(_resolved(scenario), scenario)]
    return Prediction(scenario, tuple(forecasts), recommended(forecasts))


def _resolved(scenario: Scenario) -> Options:
    return resolve_stride(scenario.options, scenario.hardware, scenario.model.params)


def timeline(scenario: Scenario, options: Options, *, steps: int | None = None) -> Recording:
    """The recording of a run with ``options``, whose stride is resolved."""
    return simulate_plan(
        node_plan(options, scenario),
        scenario.hardware,
        scenario.model,
        tokens=scenario.tokens,
        steps=steps,
        final_at_step=scenario.final_at_step(options),
        recompute=scenario.recompute,
        workers=options.workers,
    )
