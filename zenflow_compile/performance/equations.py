"""The equations of optimizer offloading, each in one place: computed with, and printed by ``plan --explain``.

Equation 1 of Deep Optimizer States, the memory of activations, traffic, and the terms of the roofline: the time that
the bytes of a step need at the rates of a machine. The roofline is a bound, not a forecast: every byte moves at full
speed, at any time. The stall of a recording or a simulation, next to it, shows what the schedule adds: updates of the
first layers are due early, and flushes begin late.

Symbols are words. Times are seconds, sizes bytes, rates per second; a *parameter* is one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Max, Symbol

from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.performance.traffic import Traffic

NEVER = 2**31 - 1
"""A stride larger than any number of subgroups: nothing is streamed."""


class Equation(NamedTuple):
    """``value``, an expression, under the name that stands for it in others; ``unit`` is empty for a plain number."""

    name: str
    unit: str
    value: Expr
    source: str

    def of(self, values: Mapping[str, float]) -> float:
        """The value; KeyError for a symbol without a number."""
        symbols, function = _compiled(self.value)
        return float(function(*[values[symbol] for symbol in symbols]))

    def line(self, values: Mapping[str, float]) -> str:
        """``name = expression = expression with its numbers = value (source)``."""
        # Symbols named like numbers: sympy would evaluate real numbers, and only the result would be left to print.
        numbers = {symbol: Symbol(f"{values[symbol.name]:.4g}") for symbol in self.value.free_symbols}
        name = f"{self.name} [{self.unit}]" if self.unit else self.name
        with_numbers = self.value.xreplace(numbers)
        return f"{name} = {self.value} = {with_numbers} = {self.of(values):.4g} ({self.source})"


@cache  # a search evaluates the same expressions thousands of times
def _compiled(expression: Expr) -> tuple[tuple[str, ...], Callable[..., Any]]:
    symbols = tuple(sorted(expression.free_symbols, key=str))
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, modules="math")


def _symbols(names: str) -> tuple[Symbol, ...]:
    # Zero is a valid value, too: the assumption only helps sympy to simplify.
    return tuple(Symbol(name, positive=True) for name in names.split())


_cpu_update, _gpu_update, _link, _cpu_downscale = _symbols("cpu_update gpu_update link cpu_downscale")
_tokens, _layers, _hidden, _vocabulary = _symbols("tokens layers hidden vocabulary")
# Fields of ``Traffic`` and ``Bandwidths``, and the device's own work.
_host, _to_host, _to_device, _state, _loads, _rewritten, _files = _symbols(
    "host to_host to_device state loads rewritten files"
)
_model, _host_rate, _host_link, _device_link, _disk = _symbols(
    "model host_bandwidth link_to_host link_to_device disk_bandwidth"
)
_device, _updating, _down, _up, _filing, _uploading, _stall = _symbols(
    "device host_update copy_to_host copy_to_device disk upload stall"
)

STRIDE_RATIO = Equation(
    "stride_ratio",
    "",
    (3 / _link + 1 / _gpu_update) / (1 / _cpu_update + 1 / _cpu_downscale - 1 / (2 * _link)),
    # k/U_c + k/D_c = 3/B + 1/U_g + k/(2 B), solved for k; rates are parameters per second, and ``link`` carries fp32.
    "subgroups on the host for each one on the device: Deep Optimizer States (Middleware '24), Equation 1",
)

_LAYER_BYTES = 34  # of activations per token and unit of width, in 16 bits, without the scores of attention, which a
# fused kernel does not keep: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
_CHECKPOINT_BYTES = 2  # likewise with recomputation: only a layer's input, in 16 bits (the same paper, section 5)
_LOGIT_BYTES = 6  # per token and word: 16-bit logits, and their softmax in fp32
_KORTHIKANTI = "an estimate: Korthikanti et al. 2022, equation 1"

ACTIVATIONS = Equation(
    "activations", "bytes", _tokens * (_LAYER_BYTES * _layers * _hidden + _LOGIT_BYTES * _vocabulary), _KORTHIKANTI
)
RECOMPUTED_ACTIVATIONS = Equation(
    "activations",
    "bytes",
    _tokens * ((_CHECKPOINT_BYTES * _layers + _LAYER_BYTES) * _hidden + _LOGIT_BYTES * _vocabulary),
    f"{_KORTHIKANTI} and section 5, with one layer in full",
)
TRAFFIC = Equation(
    "traffic", "model sizes per step", (_to_host + _to_device) / _model, "gradients down, new weights up; no state"
)

_LANES = (
    Equation("host_update", "s", _host / _host_rate, "host memory read and written by host updates"),
    Equation("copy_to_host", "s", (_to_host + _state + _rewritten) / _host_link, "gradients, state, updated weights"),
    Equation(
        "copy_to_device", "s", (_to_device + _state + _loads) / _device_link, "new weights, state, loaded weights"
    ),
    Equation("disk", "s", 2 * _files / _disk, "state read from files, and as much written"),
)
_HIDDEN = Max(0, Max(_updating, _down, _up, _filing) - _device)
_STALL = Equation("stall", "s", _HIDDEN, "no schedule avoids it: the busiest lane beyond the device's own work")
_BLOCKING = (
    Equation("upload", "s", _to_device / _device_link, "new weights"),
    Equation("stall", "s", Max(_HIDDEN, _updating, _uploading), "likewise, and nothing hides host updates and uploads"),
)
_STEP = Equation("step", "s", _device + _stall, "a lower bound")


def roofline(blocking: bool) -> tuple[Equation, ...]:
    """The equations of a step in the order in which they build on each other.

    A ``blocking`` plan hides neither host update nor upload; it may hide streamed state and files, which are read
    ahead and written after.
    """
    return (*_LANES, *(_BLOCKING if blocking else (_STALL,)), _STEP)


def roofline_values(moved: Traffic, rates: Bandwidths, *, device: float) -> dict[str, float]:
    """The numbers of ``roofline``, with its results; ``device``: seconds of the device's own work per step."""
    values = {
        **asdict(moved),
        "loads": moved.loads,
        "host_bandwidth": rates.host,
        "link_to_host": rates.to_host,
        "link_to_device": rates.to_device,
        "disk_bandwidth": math.inf if rates.disk is None else rates.disk,
        "device": device,
    }
    for equation in roofline(moved.blocking):
        values[equation.name] = equation.of(values)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The shortest times per step that measured bandwidths allow, in ms.

    Attributes:
        host_ms, to_host_ms, to_device_ms: time of each lane, streamed state and loaded weights included.
        disk_ms: likewise; None where files move and the bandwidth is not known.
        stall_ms, step_ms: see ``roofline``.
        smallest_interval: the shortest update window, in steps, with which each lane takes no longer than the device's
            own work; None if no window does, or if the plan blocks.
    """

    host_ms: float
    to_host_ms: float
    to_device_ms: float
    disk_ms: float | None
    stall_ms: float
    step_ms: float
    smallest_interval: int | None


def limit_of(moved: Traffic, rates: Bandwidths, *, device_ms: float) -> Limit:
    """The limit of a run.

    Args:
        device_ms: the device's own work per step, which hides host work: a measured step less its stall.
    """
    device = device_ms / 1e3
    values = roofline_values(moved, rates, device=device)
    there, back = moved.state + moved.loads, moved.state + moved.rewritten
    disk = 0.0 if rates.disk is None else 2 * moved.files_per_window / rates.disk
    lanes = (  # host updates, uploads with loads, gradients and what else goes to the host, files
        (moved.host_per_window / rates.host, moved.host_per_gradient / rates.host),
        (moved.upload_per_window / rates.to_device, there / rates.to_device),
        (moved.gradients_per_window / rates.to_host, (moved.host_per_gradient + back) / rates.to_host),
        (disk, 0.0),
    )
    return Limit(
        host_ms=1e3 * values["host_update"],
        to_host_ms=1e3 * values["copy_to_host"],
        to_device_ms=1e3 * values["copy_to_device"],
        disk_ms=None if moved.files and rates.disk is None else 1e3 * values["disk"],
        stall_ms=1e3 * values["stall"],
        step_ms=1e3 * values["step"],
        smallest_interval=None if moved.blocking else shortest_window(lanes, device),
    )


def shortest_window(lanes: Iterable[tuple[float, float]], time: float) -> int | None:
    """The smallest ``update_interval`` at which the work of each lane fits into ``time``; None if none does.

    Args:
        lanes: seconds of each: work per update window, and work per step.
        time: seconds of a step that hide both.
    """
    needed = 1.0
    rounding = 1e-12 * time
    for per_window, per_step in lanes:
        left = time - per_step
        if left < -rounding or (per_window and left <= rounding):
            return None
        if per_window:
            needed = max(needed, per_window / left)
    return math.ceil(needed - 1e-9)  # rounding must not turn 4.0 into 5


def update_stride(*, cpu_update: float, gpu_update: float, link: float, cpu_downscale: float) -> float:
    """Subgroups that the CPU updates for each one of the GPU, before rounding: Deep Optimizer States, Equation 1.

    Args:
        cpu_update: parameters/s that the CPU updates (the paper's U_c), for one device.
        gpu_update: parameters/s that the GPU updates (U_g).
        link: fp32 parameters/s over the link in one direction (B): bytes/s divided by 4.
        cpu_downscale: parameters/s that the CPU casts from fp32 to 16 bits (D_c); ``math.inf`` if the update casts.

    Returns:
        The ratio; ``math.inf`` if the link needs longer for a subgroup's 16-bit weights than the CPU for its update:
        then no update on the GPU makes the step shorter.

    Raises:
        ValueError: a rate is not above zero.
    """
    rates = {"cpu_update": cpu_update, "gpu_update": gpu_update, "link": link, "cpu_downscale": cpu_downscale}
    for name, rate in rates.items():
        if not rate > 0.0:
            raise ValueError(f"{name}={rate!r} must be a rate > 0 in parameters per second; measure it again")
    return math.inf if 1 / cpu_update + 1 / cpu_downscale <= 1 / (2 * link) else STRIDE_RATIO.of(rates)


def stride_of(cpu_to_gpu: float) -> int:
    """One of this many subgroups is updated on the device: one plus the ratio, rounded, at least 1.

    The paper uses k in two meanings. Equation 1's k is the ratio of ``update_stride``: k = 2 is two subgroups on the
    CPU for one on the GPU, a third of all on the GPU. Its Algorithm 1, and "every alternate subgroup", use k as a
    stride: k = 2 is half of all. This is the stride that has the equation's shares, so a ratio of 2 gives 3.

    Args:
        cpu_to_gpu: a ratio >= 0; ``math.inf`` gives ``NEVER``.

    Raises:
        ValueError: the ratio is negative or NaN.
    """
    if not cpu_to_gpu >= 0.0:
        raise ValueError(f"cpu_to_gpu={cpu_to_gpu!r} must be a number >= 0, as update_stride() gives")
    return min(NEVER, 1 + round(cpu_to_gpu)) if math.isfinite(cpu_to_gpu) else NEVER
