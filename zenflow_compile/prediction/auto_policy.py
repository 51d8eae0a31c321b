"""Options chosen by the performance model: the update stride, and the fastest policy that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import unread
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.memory import Needs, needs_of
from zenflow_compile.performance.models import ModelShape
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.planners import ParamSpec, stride_weight_bytes
from zenflow_compile.prediction.forecast import Forecast, forecast, node_plan

RATIOS = (0.25, 0.5, 0.75)
"""Shares of the state off the device that are tried where ``ratio`` is left at 1."""

WORTH_IT = 0.01
"""A later candidate has to save this share of a step: those before it are simpler, or exact where it is not."""

_FILLED = 0.9  # of the device memory that is left: estimates may be short of it


def resolve_stride(options: Options, hardware: Hardware, *, weight_bytes: int) -> Options:
    """``options`` with ``update_stride`` as a number, where it was to come from the performance model.

    Deep Optimizer States' Equation 1, with the workers that the host has by default. The host's single pass over a
    window of S steps counts as S updates: what it is weighed against is a device that updates in each of those steps,
    and streams the state for it every time. So mixtures with ``zenflow`` stream less than a blocking policy would.

    Args:
        weight_bytes: of a weight and a gradient: the model's ``policies.stride_weight_bytes``.
    """
    if not options.measures_stride:
        return options
    from zenflow_compile.performance import performance_model  # sympy takes a third of a second to import

    rates = performance_model.stride_rates(hardware, weight_bytes=weight_bytes, window=options.longest_window)
    ratio = performance_model.update_stride(**rates)
    return replace(options, update_stride=performance_model.stride_of(ratio))


def choose(
    specs: Sequence[ParamSpec],
    options: Options,
    hardware: Hardware,
    *,
    tokens: int,
    model: ModelShape | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    recompute: bool = False,
    implicit: bool = False,
) -> Options:
    """The fastest plan that fits, by simulation, as options: with those of the user that its policy does not read.

    All policies are tried and the mixtures of ``zenflow`` with streamed state, with whole parameters on the device and,
    given ``nvme_path``, with files. Knobs that steer convergence stay as they are.

    Args:
        specs: of the parameters, in forward order.
        options: what the user chose; ``policy``, ``offload_device`` and ``spare_device_bytes`` are not read.
        hardware: the node.
        tokens: per device and step.
        model: gives the work of forward and backward; None takes it from ``specs``, without attention.
        device_bytes: memory of a device for all of training, host_bytes: of the node; None takes the hardware's.
        recompute: as for ``simulate``; implicit: as for ``forecast``.

    Raises:
        ValueError: nothing fits.
    """
    hardware = replace(
        hardware,
        device_bytes=hardware.device_bytes if device_bytes is None else device_bytes,
        host_bytes=hardware.host_bytes if host_bytes is None else host_bytes,
    )
    shape = model or shape_of(specs)
    found = compare(options, hardware, shape, tokens=tokens, recompute=recompute, implicit=implicit)
    if (best := recommended(found)) is not None:
        return _with_unread(Options.from_keywords(**best.options), options)
    near = min(found, key=lambda each: each.missing_bytes)
    lacks = " and ".join(f"{size / 1e9:.3g} GB of {memory} memory" for memory, size in near.shortages.items())
    raise ValueError(
        f"no policy fits {hardware.name!r}: {near.title} comes nearest and lacks {lacks}; use fewer tokens "
        "per step, recompute activations, give nvme_path for state in files, or take a smaller model"
    )


def compare(
    options: Options,
    hardware: Hardware,
    model: ModelShape,
    *,
    tokens: int,
    recompute: bool = False,
    implicit: bool = False,
    epoch_tokens: float | None = None,
) -> list[Forecast]:
    """A forecast of every policy and mixture, the simplest first; of one with several settings the best that fits.

    Arguments as for ``choose`` and ``forecast``.
    """
    run = _Run(hardware, model, tokens, recompute)
    found = []
    for label, settings in _candidates(options, run):
        fitting = [each for each in settings if len(settings) == 1 or not run.needs(each).shortages(hardware)]
        forecasts = [
            forecast(
                each,
                hardware,
                model,
                tokens=tokens,
                recompute=recompute,
                implicit=implicit,
                epoch_tokens=epoch_tokens,
                label=label,
            )
            for each in fitting or settings[:1]
        ]
        found.append(min(forecasts, key=lambda each: each.step_s))
    return found


def recommended(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fastest that fits, or one before it that is hardly slower; None if none fits."""
    best: Forecast | None = None
    for each in forecasts:
        if each.fits and (best is None or each.step_s < best.step_s * (1 - WORTH_IT)):
            best = each
    return best


@dataclass(frozen=True, slots=True)
class _Run:
    """What decides, beside options, how much memory is needed."""

    hardware: Hardware
    model: ModelShape
    tokens: int
    recompute: bool

    def needs(self, options: Options) -> Needs:
        return needs_of(
            node_plan(options, self.hardware, self.model),
            self.model,
            devices=self.hardware.devices,
            tokens=self.tokens,
            recompute=self.recompute,
            staging_bytes=options.staging_bytes,
        )


def _candidates(options: Options, run: _Run) -> Iterator[tuple[str, list[Options]]]:
    """Policies and mixtures with the settings to try. A stride that was given is for those that stream."""
    hardware = run.hardware
    weight_bytes = stride_weight_bytes(run.model.params)
    plain = _plain(options)

    def of(policy: str, **changes: Any) -> Options:
        return resolve_stride(replace(plain, policy=policy, **changes), hardware, weight_bytes=weight_bytes)

    ratios = RATIOS if options.ratio == 1.0 else (options.ratio,)
    yield "resident", [of("resident")]
    yield "twinflow", [of("twinflow", ratio=ratio) for ratio in ratios]
    yield "zero_offload", [of("zero_offload")]
    yield (
        "deep_optimizer_states",
        [
            of("deep_optimizer_states", ratio=ratio, update_stride=options.update_stride)
            for ratio in sorted({*ratios, 1.0})
        ],
    )
    zenflow = of("zenflow")
    yield "zenflow", [zenflow]
    if spare := _spare_bytes(zenflow, run):
        yield "zenflow, device filled", [of("zenflow", spare_device_bytes=spare)]
    yield "zenflow, streamed", [of("zenflow", update_stride=options.update_stride or "auto")]
    if options.nvme_path is not None and hardware.disk_read is not None and hardware.disk_write is not None:
        yield "zenflow, files", [of("zenflow", offload_device="nvme", nvme_path=options.nvme_path)]
        yield "zero_infinity", [of("zero_infinity", nvme_path=options.nvme_path)]


def _plain(options: Options) -> Options:
    """Without what candidates are given for themselves."""
    return replace(options, offload_device="cpu", nvme_path=None, spare_device_bytes=0, update_stride=None)


def _with_unread(chosen: Options, options: Options) -> Options:
    """``chosen`` with the values of ``options`` for what its policy does not read."""
    place = {name: getattr(chosen, name) for name in ("policy", "offload_device", "nvme_path")}
    plain = replace(_plain(options), **place)
    return replace(chosen, **{name: getattr(plain, name) for name in unread(plain)})


def _spare_bytes(options: Options, run: _Run) -> int:
    """``spare_device_bytes`` that fill the device with further whole parameters, as far as the estimates are trusted.

    A parameter that stays takes more than its state: its gradient waits for the step, too.
    """
    devices = run.hardware.devices
    offloaded = [param for param in node_plan(options, run.hardware, run.model).params if param.offloaded]
    spare = [-(-size // devices) for size in accumulate(param.whole_state_bytes for param in offloaded)]
    taken = sum(run.needs(options).device.values())
    limit = taken + _FILLED * (run.hardware.device_bytes - taken)

    def filled(size: int) -> int:
        return sum(run.needs(replace(options, spare_device_bytes=size)).device.values())

    kept = bisect_right(spare, limit, key=filled)
    return spare[kept - 1] if kept else 0


def shape_of(specs: Sequence[ParamSpec]) -> ModelShape:
    """A model of which only the parameters are known: its repeated blocks are layers; attention counts for nothing."""
    blocks = repeated_blocks([spec.shape for spec in specs])
    width = next((spec.shape[-1] for spec in specs if len(spec.shape) > 1), 1)
    layers = (blocks[2] - blocks[0]) // blocks[1] if blocks else len(specs)
    return ModelShape(
        name="model", params=tuple(specs), layers=layers, hidden=width, context=0, source="its parameters"
    )
