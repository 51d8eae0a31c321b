"""Chooses options by the performance model: the update stride, and the fastest policy that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from zenflow_compile.options.options import Options
from zenflow_compile.options.unread import unread
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.model_shapes import ModelShape
from zenflow_compile.planning.model_blocks import repeated_blocks
from zenflow_compile.planning.plan import FP32_BYTES, QUANTIZATION_BLOCK, moment_bytes
from zenflow_compile.planning.planners import ParamSpec, stride_weight_bytes
from zenflow_compile.prediction.forecast import Forecast, forecast, needs, node_plan
from zenflow_compile.prediction.scenario import Scenario

RATIOS = (0.75, 0.5, 0.25)
"""Shares of the state off the device that are tried if ``ratio`` is 1."""

RESIDENTS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the resident parameters with which the device is full that are tried."""

WORTH_IT = 0.01
"""Share of a step that a later candidate must save: earlier ones are simpler, or exact where the later is not."""

_FILLED = 0.9  # share of the free device memory: estimates may be too low


def resolve_stride(options: Options, hardware: Hardware, specs: Sequence[ParamSpec]) -> Options:
    """``options`` with a number for an ``update_stride`` that comes from the performance model.

    Deep Optimizer States' Equation 1, with the workers that the host has by default. The host's single pass over an
    update window of S steps counts as S updates: the device would update, and stream the state, in each of those steps.
    So mixtures with ``zenflow`` stream less than a blocking policy would.
    """
    if not options.measures_stride:
        return options
    from zenflow_compile.performance import performance_model  # imports sympy, which takes a third of a second

    per_block = FP32_BYTES * QUANTIZATION_BLOCK + 2 * moment_bytes(options.state_dtype, QUANTIZATION_BLOCK)
    rates = performance_model.stride_rates(
        hardware,
        weight_bytes=stride_weight_bytes(specs),
        window=options.longest_window,
        state_bytes=per_block / QUANTIZATION_BLOCK,
    )
    ratio = performance_model.update_stride(**rates)
    return replace(options, update_stride=performance_model.stride_of(ratio))


def choose(scenario: Scenario) -> Options:
    """The options of the fastest plan that fits, by simulation. Options that its policy does not read stay.

    Candidates are all policies, and the mixtures of ``zenflow`` with streamed state, with resident parameters and,
    given ``nvme_path``, with files. Options that steer convergence stay as they are; ``policy``, ``offload_device``
    and ``spare_device_bytes`` are not read.

    Raises:
        ValueError: no policy fits.
    """
    found = compare(scenario)
    if (best := recommended(found)) is not None:
        return _with_unread(Options.from_keywords(**best.options), scenario.options)
    near = min(found, key=lambda each: each.missing_bytes)
    lacks = " and ".join(f"{size / 1e9:.3g} GB of {memory} memory" for memory, size in near.shortages.items())
    raise ValueError(
        f"no policy fits {scenario.hardware.name!r}: {near.title} comes nearest and lacks {lacks}; use fewer tokens "
        "per step, recompute activations, give nvme_path for state in files, or take a smaller model"
    )


def compare(scenario: Scenario) -> list[Forecast]:
    """A forecast of every policy and mixture, the simplest first.

    Of a policy with several settings, those that fit are forecast. The one with the fewest resident parameters stays of
    those that are ``WORTH_IT`` slower than the fastest at most. If none fits, the first stays.
    """
    found = []
    for label, settings in _candidates(scenario):
        several = len(settings) > 1
        fitting = [each for each in settings if not several or not needs(each, scenario).shortages(scenario.hardware)]
        forecasts = [forecast(each, scenario, label=label) for each in fitting or settings[:1]]
        fastest = min(each.step_s for each in forecasts)
        found.append(next(each for each in forecasts if each.step_s * (1 - WORTH_IT) <= fastest))
    return found


def recommended(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fastest that fits, or an earlier one that is hardly slower; None if none fits."""
    best: Forecast | None = None
    for each in forecasts:
        if each.fits and (best is None or each.step_s < best.step_s * (1 - WORTH_IT)):
            best = each
    return best


def _candidates(scenario: Scenario) -> Iterator[tuple[str, list[Options]]]:
    """Policies and mixtures with the settings to try, the fewest resident parameters first.

    The user's stride is for those that stream.
    """
    options, hardware = scenario.options, scenario.hardware
    plain = _plain(options)

    def of(policy: str, **changes: Any) -> Options:
        return resolve_stride(replace(plain, policy=policy, **changes), hardware, scenario.model.params)

    ratios = RATIOS if options.ratio == 1.0 else (options.ratio,)
    yield "resident", [of("resident")]
    yield "twinflow", [of("twinflow", ratio=ratio) for ratio in ratios]
    yield "zero_offload", [of("zero_offload")]
    if options.offload_weights is False:  # this policy keeps all weights on the device
        streaming = partial(of, "deep_optimizer_states", update_stride=options.update_stride)
        yield "deep_optimizer_states", [streaming(ratio=ratio) for ratio in sorted({*ratios, 1.0}, reverse=True)]
    zenflow = of("zenflow")
    spare = _spare_bytes(zenflow, scenario)
    if not spare or not options.fill_device:
        yield "zenflow", [zenflow]
    if spare:
        label = "zenflow, device filled" if options.fill_device else "zenflow, more residents"
        yield label, [of("zenflow", spare_device_bytes=size) for size in spare]
    yield "zenflow, streamed", [of("zenflow", update_stride=options.update_stride or "auto")]
    if options.nvme_path is not None and hardware.disk_read is not None and hardware.disk_write is not None:
        yield "zenflow, files", [of("zenflow", offload_device="nvme", nvme_path=options.nvme_path)]
        yield "zero_infinity", [of("zero_infinity", nvme_path=options.nvme_path)]


def _plain(options: Options) -> Options:
    """Return ``options`` without those that candidates set."""
    return replace(options, offload_device="cpu", nvme_path=None, spare_device_bytes=0, update_stride=None)


def _with_unread(chosen: Options, options: Options) -> Options:
    """``chosen`` with the values of ``options`` that its policy does not read."""
    place = {name: getattr(chosen, name) for name in ("policy", "offload_device", "nvme_path")}
    plain = replace(_plain(options), **place)
    return replace(chosen, **{name: getattr(plain, name) for name in unread(plain)})


def _spare_bytes(options: Options, scenario: Scenario) -> list[int]:
    """``spare_device_bytes`` to try, in rising order: shares of what fills the device up to the share ``_FILLED``.

    A resident parameter takes more than its state: its gradient stays on the device until the step. Under
    ``fill_device`` the largest one alone; empty if no further parameter fits.
    """
    devices, device_bytes = scenario.hardware.devices, scenario.hardware.device_bytes
    offloaded = [param for param in node_plan(options, scenario).params if param.offloaded]
    spare = [-(-size // devices) for size in accumulate(param.whole_state_bytes for param in offloaded)]
    taken = sum(needs(options, scenario).device.values())
    limit = taken + _FILLED * (device_bytes - taken)

    def filled(size: int) -> int:
        return sum(needs(replace(options, spare_device_bytes=size), scenario).device.values())

    fitting = bisect_right(spare, limit, key=filled)
    shares = (1.0,) if options.fill_device else RESIDENTS
    return sorted({spare[max(1, round(share * fitting)) - 1] for share in shares}) if fitting else []


def shape_of(specs: Sequence[ParamSpec]) -> ModelShape:
    """The shape of a model with known parameters only: repeated blocks are its layers, and attention is left out."""
    blocks = repeated_blocks([spec.shape for spec in specs])
    width = next((spec.shape[-1] for spec in specs if len(spec.shape) > 1), 1)
    layers = (blocks[2] - blocks[0]) // blocks[1] if blocks else len(specs)
    return ModelShape(
        name="model", params=tuple(specs), layers=layers, hidden=width, context=0, source="its parameters"
    )
