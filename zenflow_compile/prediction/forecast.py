"""Predicts a run with given options on given hardware: memory, time of a step, and traffic."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from zenflow_compile.options.options import LONGEST_UPDATE_INTERVAL, Options
from zenflow_compile.performance.equations import (
    ACTIVATIONS,
    NEVER,
    RECOMPUTED_ACTIVATIONS,
    STRIDE_RATIO,
    TRAFFIC,
    limit_of,
    roofline,
    roofline_values,
    stride_of,
    update_stride,
)
from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.memory import MemoryNeeds, activation_values, needs_of
from zenflow_compile.performance.model_shape import ModelShape
from zenflow_compile.performance.traffic import Traffic, traffic_of
from zenflow_compile.planning.dtypes import BFLOAT16, FLOAT16, FLOAT32
from zenflow_compile.planning.plan import (
    FP32_BYTES,
    QUANTIZATION_BLOCK,
    STATE_BYTES,
    Plan,
    device_update_bytes,
    moment_bytes,
)
from zenflow_compile.planning.planners import ParamSpec, make_plan, stride_param
from zenflow_compile.planning.weight_memory import (
    WeightMemory,
    divide_budget,
    offloadable_weights,
    reloaded_weights,
    weight_budget,
)
from zenflow_compile.prediction.simulate import SteadyStep, steady_step
from zenflow_compile.rules.rule import Rule

if TYPE_CHECKING:
    import torch

_S_PER_HOUR = 3600.0

WORTH_IT = 0.01
"""Share of a step that another plan must save: below it, the one that is nearest to AdamW is taken."""

ROUNDED = "with rounded moments"
"""The departure from AdamW that every weight may have."""


DTYPES: Mapping[str, torch.dtype] = {"bf16": BFLOAT16, "fp16": FLOAT16, "fp32": FLOAT32}
"""Dtypes of weights by the names that ``dtype=`` has for them."""

SOME_DISK = "/path/on/a/local/disk"
"""The ``nvme_path`` of a prediction, which writes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training run of ``model`` on ``hardware``.

    Attributes:
        model: with weights of the training dtype, and the sequence length as its context.
        hardware: with the devices and the memory in use.
        tokens: per device and optimizer step.
        options: of the run; under policy ``"auto"`` those that all policies share.
        policy: one, or ``"auto"`` for all.
        in_backward: optimizer in backward: updates run in the backward, without an optimizer object.
        recompute: activations are computed again in the backward; None: a search decides.
        divided: a search decides in how many micro-batches the tokens of a step come.
        epoch_tokens: tokens of an epoch, over all devices; None: not given.
    """

    model: ModelShape
    hardware: Hardware
    tokens: int
    options: Options = field(default_factory=Options)
    policy: str = "auto"
    in_backward: bool = False
    recompute: bool | None = False
    divided: bool = False
    epoch_tokens: float | None = None

    @property
    def dtype(self) -> str:
        """Names of the weights' dtypes, as in ``DTYPES`` where they are there; several are joined: ``bf16+fp32``."""
        names = {str(dtype): name for name, dtype in DTYPES.items()}
        found = dict.fromkeys(str(spec.dtype) for spec in self.model.params)
        return "+".join(names.get(each, each) for each in found)

    @property
    def rule(self) -> Rule:
        """The update rule; where matrices have one of their own, that one."""
        rules = [spec.rule for spec in self.model.params]
        return next((rule for rule in rules if rule.of_matrix), rules[0])

    def final_at_step(self, options: Options) -> bool:
        """Whether gradients are final only after the whole backward: with an optimizer object, or a global norm."""
        return not self.in_backward or options.max_grad_norm is not None

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again, where no search has to decide it."""
        assert self.recompute is not None
        return self.recompute

    @property
    def note(self) -> str | None:
        """What the prediction leaves out, as a sentence; None if it is complete."""
        if self.hardware.all_devices == 1:
            return None
        share = "" if self.hardware.devices == 1 else "resident state, and an equal share of the other "
        return (
            f"One of the {self.hardware.all_devices} devices is simulated, with {share or 'the '}optimizer state and "
            "of the host of its node; it sends gradients and gets changed weights in rings, as with process_group=."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForecast:
    """Weights in host memory, and what crosses the link for them.

    Attributes:
        kept, offloaded: number of weights that stay on the device, and of those that are loaded around their uses.
        offloaded_bytes: of the latter; ring_bytes: device memory for those of them that are loaded.
        micro_batches: forwards and backwards of a step.
        micro_batch_bytes: to the device, in one forward and its backward.
        to_device, to_host: bytes per step; the second are those of weights that the device has updated.
    """

    kept: int
    offloaded: int
    offloaded_bytes: int
    ring_bytes: int
    micro_batches: int
    micro_batch_bytes: int
    to_device: float
    to_host: float

    @property
    def sentence(self) -> str:
        """How often weights cross, and how many bytes."""
        if not self.offloaded:
            return "All weights fit the budget of offload_weights, and stay on the device."
        several = " Weights cross once per micro-batch: fewer and larger ones move less."
        return (
            f"{self.offloaded} weights of {self.offloaded_bytes / 1e9:.1f} GB are loaded in each forward, and again in "
            f"its backward: {self.micro_batch_bytes / 1e9:.1f} GB cross to the device per micro-batch, "
            f"{self.to_device / 1e9:.1f} GB per step.{several if self.micro_batches > 1 else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted numbers of one policy with its options.

    Attributes:
        label: the policy, and whether its state is in files; ``title`` adds the numbers that were chosen for it.
        options: the policy, and the options that it reads and that are not at their defaults: the block to paste.
        micro_batches: forwards and backwards of a step; micro_batch_tokens: most tokens of each.
        recompute: activations are computed again in the backward.
        needs: bytes by item; shortages: missing bytes by memory; empty if the policy fits.
        step_s, stall_s: a step, and the time in it that the device waits, in seconds.
        host_update_s: seconds per step in which the host's workers update, all at the same time. The summary of a
            recording adds up the workers.
        traffic: gradients and new weights over the link per step, in model sizes; state: streamed state, likewise.
        loads: offloaded weights over the link, likewise; weights: what ``offload_weights`` does, None without it.
        disk_bytes: read and written per step by the node.
        tokens_per_s: of all devices. hours: for an epoch; None if its length was not given.
    """

    label: str
    policy: str
    options: dict[str, Any]
    micro_batches: int
    micro_batch_tokens: int
    recompute: bool
    needs: MemoryNeeds
    shortages: dict[str, int]
    step_s: float
    stall_s: float
    host_update_s: float
    traffic: float
    state: float
    loads: float
    weights: WeightForecast | None
    disk_bytes: float
    tokens_per_s: float
    hours: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with ``fits``."""
        return {"fits": self.fits} | asdict(self)

    @property
    def fits(self) -> bool:
        """Whether every memory is large enough."""
        return not self.shortages

    @property
    def is_free(self) -> bool:
        """Whether the device waits for nothing, or hardly."""
        return self.stall_s <= WORTH_IT * self.step_s

    @property
    def device_bytes(self) -> int:
        """Memory that a device needs."""
        return sum(self.needs.device.values())

    @property
    def host_bytes(self) -> int:
        """Memory that the node needs."""
        return sum(self.needs.host.values())

    @property
    def moves(self) -> float:
        """All that crosses the link per step, in model sizes."""
        return self.traffic + self.state + self.loads

    @property
    def exact(self) -> bool:
        """Whether the numbers are those of the rule in every step, to rounding."""
        return not self.departures

    @property
    def departures(self) -> dict[str, str]:
        """How the numbers differ from the rule's, each with the option that makes them equal; empty if they do not."""
        options = Options.from_keywords(**self.options)
        return departures(options) if self.traffic else _rounding(options)

    @property
    def title(self) -> str:
        """The label with ``ratio``, ``update_stride`` and GB of residents, where not the default: ``twinflow 0.5``."""
        settings = []
        if self.policy in ("twinflow", "deep_optimizer_states") and "ratio" in self.options:
            settings.append(f"{self.options['ratio']:g}")
        if self.policy in ("zenflow", "deep_optimizer_states") and "update_stride" in self.options:
            settings.append(str(self.options["update_stride"]) if self.state else "none")
        if self.policy == "zenflow" and isinstance(share := self.options.get("device_share"), int):
            settings.append(f"{share / 1e9:.3g} GB")
        return " ".join([self.label, ", ".join(settings)]).rstrip()


def departures(options: Options) -> dict[str, str]:
    """How deferred columns differ from the rule's, each with the option that makes them equal; empty if they do not."""
    if options.policy != "zenflow":
        return _rounding(options)
    most = "up to " if options.adaptive else ""
    window = f"once per update window of {most}{options.longest_window} steps"
    found = (
        (options.longest_window > 1, window, "update_interval=1"),
        (options.staleness > 0, "a step late", "staleness=0"),
        (options.gradient_transfer == "int8", "by rounded gradients", 'gradient_transfer="each"'),
    )
    return {how: remedy for departs, how, remedy in found if departs} | _rounding(options)


def _rounding(options: Options) -> dict[str, str]:
    return {} if options.state_dtype == "fp32" else {ROUNDED: 'state_dtype="fp32"'}


def node_plan(options: Options, scenario: Scenario) -> Plan:
    """The plan of all devices together.

    Raises:
        ValueError: ``offload_weights`` has no space for the weights that must be on the device at a time.
    """
    plan = make_plan(scenario.model.params, options)
    return replace(
        plan,
        weights=weight_memory(options, scenario),
        micro_batches=micro_batches(options),
        host_window_bytes=window_of_node(options, scenario.hardware),
    )


def window_of_node(options: Options, hardware: Hardware) -> int | None:
    """Bytes that cache files for all devices together: each of them has ``host_window_bytes``."""
    window = options.host_window_bytes
    return None if window is None else window * hardware.devices


def micro_batches(options: Options) -> int:
    """Backwards of a step: one, unless their number is given."""
    return options.gradient_accumulation_steps or 1


def weight_memory(options: Options, scenario: Scenario) -> WeightMemory | None:
    """Which weights are in host memory; None if all stay on the device. Raises ValueError as ``node_plan``."""
    if options.offload_weights is False:
        return None
    specs = scenario.model.params
    shapes = [spec.shape for spec in specs]
    # Weights whose state is streamed stay on the device.
    stays = [spec.rule.of_matrix and options.policy != "resident" for spec in specs]
    sizes = offloadable_weights(
        shapes, [0 if stay else spec.numel * spec.dtype.itemsize for stay, spec in zip(stays, specs, strict=True)]
    )
    budget = weight_budget(options.offload_weights, {specs[index].name: size for index, size in sizes.items()})
    offloaded, ring = divide_budget(budget, shapes, sizes)
    reloaded = reloaded_weights(shapes, sizes, offloaded, ring) if scenario.recomputes else frozenset[int]()
    return WeightMemory(offloaded=offloaded, reloaded=reloaded, ring_bytes=ring)


def needs(options: Options, scenario: Scenario) -> MemoryNeeds:
    """The memory that a run with ``options`` takes."""
    return needs_in(scenario, node_plan(options, scenario))


def needs_in(scenario: Scenario, plan: Plan) -> MemoryNeeds:
    """The memory that a run with ``plan`` takes."""
    return needs_of(
        plan,
        scenario.model,
        devices=scenario.hardware.devices,
        tokens=scenario.tokens,
        recompute=scenario.recomputes,
    )


def forecast(options: Options, scenario: Scenario) -> Forecast:
    """Predict a run with ``options``, whose ``update_stride`` is resolved, instead of those of the scenario.

    Raises:
        ValueError: the hardware lacks a number that the policy needs, or has fewer cores than ``options.workers``.
    """
    hardware, plan = scenario.hardware, node_plan(options, scenario)
    step = steady_step(
        plan,
        hardware,
        scenario.model,
        tokens=scenario.tokens,
        final_at_step=scenario.final_at_step(options),
        recompute=scenario.recomputes,
        workers=options.threads(hardware.cores // hardware.devices),
    )
    found = forecast_of(options, scenario, needs_in(scenario, plan), step, model_bytes=plan.model_bytes)
    return replace(found, weights=_weights(plan, step))


def forecast_of(
    options: Options, scenario: Scenario, needed: MemoryNeeds, step: SteadyStep, *, model_bytes: int
) -> Forecast:
    """The forecast of a simulated step, without what ``offload_weights`` does."""
    hardware = scenario.hardware
    size = model_bytes / hardware.devices or 1.0
    tokens = scenario.tokens * hardware.all_devices
    rate = tokens / step.seconds if step.seconds else math.inf  # a model without elements takes no time
    return Forecast(
        label=f"{options.policy}{', files' if options.offload_device != 'cpu' else ''}",
        policy=options.policy,
        options=changed(options),
        micro_batches=micro_batches(options),
        micro_batch_tokens=-(-scenario.tokens // micro_batches(options)),
        recompute=scenario.recomputes,
        needs=needed,
        shortages=needed.shortages(hardware),
        step_s=step.seconds,
        stall_s=step.stall,
        host_update_s=step.host_update,
        traffic=(step.to_host + step.to_device) / size,
        state=step.state / size,
        loads=(step.loads + step.written_back) / size,
        weights=None,
        disk_bytes=step.disk * hardware.devices,
        tokens_per_s=rate,
        hours=None if scenario.epoch_tokens is None else scenario.epoch_tokens / rate / _S_PER_HOUR,
    )


def _weights(plan: Plan, step: SteadyStep) -> WeightForecast | None:
    if plan.weights is None:
        return None
    moved = traffic_of(plan) or Traffic()
    offloaded = len(plan.weights.offloaded)
    return WeightForecast(
        kept=len(plan.params) - offloaded,
        offloaded=offloaded,
        offloaded_bytes=plan.offloaded_weight_bytes,
        ring_bytes=plan.weights.ring_bytes,
        micro_batches=plan.micro_batches,
        micro_batch_bytes=(moved.forward_loads + moved.backward_loads) // plan.micro_batches,
        to_device=step.loads,
        to_host=step.written_back,
    )


def changed(options: Options) -> dict[str, Any]:
    """The policy, and every option that it reads and that is not at its default."""
    values = {each.name: getattr(options, each.name) for each in fields(Options)}
    defaults = {each.name: each.default for each in fields(Options)}
    left_out = {name for name, value in values.items() if value == defaults[name]} | set(options.unread)
    return {name: value for name, value in values.items() if name == "policy" or name not in left_out}


def stride_rates(
    hardware: Hardware,
    *,
    weight_bytes: float = 2,
    window: int = 1,
    state_bytes: float = STATE_BYTES,
    wide_bytes: float = STATE_BYTES,
) -> dict[str, float]:
    """The arguments of ``update_stride`` for a machine, per device, with the workers that it has by default.

    The slower of its workers and its memory limits the host's update, which also casts. Its one pass over an update
    window counts as ``window`` updates, since the device would update, and stream the state, in each of these steps; it
    reads as many gradients. So mixtures with ``zenflow`` stream less than a blocking policy would.

    Args:
        weight_bytes, state_bytes: of an element, as they are stored. wide_bytes: of its state in fp32.
    """
    host_bytes = 2 * state_bytes + 2 * weight_bytes  # state both ways, a gradient read, a weight written
    cores = hardware.devices * hardware.workers * hardware.adam_per_core
    node = min(cores, hardware.host_bandwidth / host_bytes)
    updates_per_pass = window * host_bytes / (host_bytes + (window - 1) * weight_bytes)
    return {
        "cpu_update": updates_per_pass * node / hardware.devices,
        "gpu_update": hardware.device_bandwidth / device_update_bytes(wide_bytes),
        # State goes both ways. Equation 1 counts it in fp32.
        "link": min(hardware.link_to_host, hardware.link_to_device) / FP32_BYTES * STATE_BYTES / state_bytes,
        "cpu_downscale": math.inf,
    }


def _rates_of(options: Options, hardware: Hardware, specs: Sequence[ParamSpec]) -> dict[str, float]:
    largest = stride_param(specs)
    arrays = () if largest is None else largest.rule.arrays
    dtypes = (options.state_dtype if array.rounded else "fp32" for array in arrays)
    per_block = FP32_BYTES * QUANTIZATION_BLOCK + sum(moment_bytes(dtype, QUANTIZATION_BLOCK) for dtype in dtypes)
    return stride_rates(
        hardware,
        weight_bytes=0 if largest is None else largest.dtype.itemsize,
        window=options.longest_window,
        state_bytes=per_block / QUANTIZATION_BLOCK,
        wide_bytes=FP32_BYTES * (1 + len(arrays)),
    )


def resolve_stride(options: Options, hardware: Hardware, specs: Sequence[ParamSpec]) -> Options:
    """``options`` with a number for an ``update_stride`` that is left to Deep Optimizer States' Equation 1."""
    if not options.measures_stride:
        return options
    return replace(options, update_stride=stride_of(update_stride(**_rates_of(options, hardware, specs))))


def explain(found: Forecast, scenario: Scenario) -> dict[str, Any]:
    """The equations of ``found`` with their numbers, without those whose value is zero.

    Returns:
        ``explained``, one per line; ``stride``, of a plan with one: what Equation 1 would choose;
        ``smallest_interval``, the shortest update window that is found whose simulated stall is at most ``WORTH_IT`` of
        the step, or None: not there if the step waits for host updates anyway.
    """
    options, hardware = Options.from_keywords(**found.options), scenario.hardware
    scenario = replace(scenario, recompute=found.recompute)
    plan = node_plan(options, scenario)
    moved, device = traffic_of(plan) or Traffic(blocking=True), found.step_s - found.stall_s
    waits = moved.blocking or not options.overlap_step
    if not scenario.final_at_step(options):  # the backward hides host updates
        moved = replace(moved, blocking=False)
    rates = hardware.bandwidths(options.threads(hardware.cores // hardware.devices))
    stride = _rates_of(options, hardware, scenario.model.params)
    micro_batch = -(-scenario.tokens // plan.micro_batches)
    values = {
        **activation_values(scenario.model, micro_batch),
        **stride,
        **roofline_values(moved, rates, device=device),
        "model": plan.model_bytes or 1,
    }
    streams = options.policy == "deep_optimizer_states" and math.isfinite(update_stride(**stride))
    equations = (
        *([STRIDE_RATIO] if streams else []),
        RECOMPUTED_ACTIVATIONS if scenario.recompute else ACTIVATIONS,
        TRAFFIC,
        *roofline(moved.blocking),
    )
    explained: dict[str, Any] = {"explained": [each.line(values) for each in equations if each.of(values)]}
    explained |= _stride(found, options, scenario)
    if waits:
        return explained
    bound = limit_of(moved, rates, device_ms=1e3 * device / (1 - WORTH_IT)).smallest_interval
    return explained | {"smallest_interval": None if bound is None else _smallest_interval(options, scenario, bound)}


def _stride(found: Forecast, options: Options, scenario: Scenario) -> dict[str, str]:
    """How a stride differs from that of Equation 1, as a sentence; empty for a plan without a stride."""
    if options.stride is None:
        return {}
    hardware, specs = scenario.hardware, scenario.model.params
    by_equation = resolve_stride(replace(options, update_stride="auto"), hardware, specs).stride
    step_s = forecast(replace(options, update_stride=by_equation), scenario).step_s
    chosen, equation = _named_stride(options.stride), _named_stride(by_equation)
    slower = "" if options.stride == by_equation else f", {step_s / found.step_s - 1:.1%} longer"
    return {"stride": f"update_stride: {chosen}; with Equation 1's {equation} a step takes {step_s:.4g} s{slower}"}


def _named_stride(stride: int | None) -> str:
    return "none (nothing is streamed)" if stride in (None, NEVER) else str(stride)


def _smallest_interval(options: Options, scenario: Scenario, bound: int) -> int | None:
    """The first ``update_interval`` from ``bound`` on that hardly stalls, by doubling it and bisection."""
    longest = min(LONGEST_UPDATE_INTERVAL, options.resolved_select_interval(LONGEST_UPDATE_INTERVAL))

    def is_free(interval: int) -> bool:
        return forecast(replace(options, update_interval=interval), scenario).is_free

    before, interval = bound - 1, bound
    while interval <= longest and not is_free(interval):
        before, interval = interval, min(2 * interval, max(longest, interval + 1))
    return None if interval > longest else bisect_left(range(interval), True, lo=before + 1, key=is_free)


STATE: tuple[Mapping[str, Any], ...] = tuple(
    {"state_dtype": dtype, "split_master": split} for dtype, split in product(("fp32", "bf16", "fp8"), (False, True))
)
"""Ways to store the state."""

GRADIENTS: tuple[Mapping[str, Any], ...] = tuple({"gradient_transfer": way} for way in ("each", "int8", "mean"))
"""Ways to keep the gradients of update windows."""

_NOT_OF_THE_OPTIMIZER = ("weights", "loaded weights", "activations")


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination of ``STATE`` and ``GRADIENTS``.

    Attributes:
        options: one of ``STATE`` and one of ``GRADIENTS``.
        host, disk: bytes per parameter of the model, of the node.
        device: likewise of all devices, without weights and activations.
    """

    options: Mapping[str, Any]
    host: float
    device: float
    disk: float


def bytes_per_parameter(options: Options, scenario: Scenario) -> list[Combination]:
    """The memory of each combination that goes together, under the policy of ``options`` and its other values."""
    found = []
    count = max(1, scenario.model.numel)
    for state, gradients in product(STATE, GRADIENTS):
        changes = {**state, **gradients}
        changed = replace(options, **changes)
        if not changes.keys().isdisjoint(changed.unread):
            continue
        try:
            needed = needs(changed, scenario)
        except ValueError:  # these exclude each other, or the model cannot have them: no combination
            continue
        of_optimizer = [size for name, size in needed.device.items() if name not in _NOT_OF_THE_OPTIMIZER]
        found.append(
            Combination(
                options=changes,
                host=sum(needed.host.values()) / count,
                device=sum(of_optimizer) * scenario.hardware.devices / count,
                disk=sum(needed.disk.values()) / count,
            )
        )
    return found
