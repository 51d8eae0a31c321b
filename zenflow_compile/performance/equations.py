"""The equations of optimizer offloading: symbolic, each with its meaning and source.

They are a fluid model of a step. Lanes (device, link each way, cores, host memory, disk, other devices) work in
parallel. A step takes at least as long as its busiest lane, and at least the sum of its phases where the schedule puts
work after the backward; each phase is as long as the busiest lane in it. So a step is a lower bound of the timeline
that ``simulate`` runs: blocks of finite size, full rings, merges and cores that copies take only make it longer.
Updates and copies share the host's memory, so its lane carries both. The model of Deep Optimizer States leaves that
out, and promises 1.25 to 1.5 times the throughput that its authors measured.

The roofline has the same lanes with measured rates. Times are seconds, sizes bytes of all devices together, rates
per second; a *parameter* is one element. Bandwidths of memory count reads and writes together, those of a link one
direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy
from sympy import Expr, Max, Symbol

from zenflow_compile.performance.formula import Formula, positive_symbols
from zenflow_compile.performance.workload import DEVICE_UPDATE_BYTES, HOST_PASS_BYTES

# What a plan moves: see ``Traffic``.
gradients_per_step, gradients_per_window, uploads_per_window = positive_symbols(
    "gradients_per_step gradients_per_window uploads_per_window"
)
updates_per_window, files_per_window = positive_symbols("updates_per_window files_per_window")
forward_loads, backward_loads, rewritten = positive_symbols("forward_loads backward_loads rewritten")
state, update_interval, model_bytes = positive_symbols("state update_interval model_bytes")
# Elements whose state the device updates, and shares of state and gradients: see ``StepSettings``.
updated_on_device, prefetched, copied_first = positive_symbols("updated_on_device prefetched copied_first")
(loaded_ahead,) = positive_symbols("loaded_ahead")
# The model and the machine. Each device has its own link; cores, host memory and disk belong to the node.
devices, forward, backward, collectives, gathers = positive_symbols("devices forward backward collectives gathers")
link_to_host, link_to_device, device_bandwidth = positive_symbols("link_to_host link_to_device device_bandwidth")
host_bandwidth, core_rate = positive_symbols("host_bandwidth core_rate")
disk_read_byte, disk_write_byte = positive_symbols("disk_read_byte disk_write_byte")
# The update stride and ZenFlow's closed form. Rates are parameters per second; ``link`` carries fp32 values.
cpu_update, gpu_update, link, cpu_downscale = positive_symbols("cpu_update gpu_update link cpu_downscale")
(topk_ratio,) = positive_symbols("topk_ratio")

_FLUID = "fluid limit, a lower bound: no lane works less, and no phase is shorter than its busiest lane"
_TRAFFIC = Symbol("traffic", positive=True)
_STEP = Symbol("step", positive=True)

STRIDE_RATIO = Formula(
    Symbol("stride_ratio"),
    "",
    (3 / link + 1 / gpu_update) / (1 / cpu_update + 1 / cpu_downscale - 1 / (2 * link)),
    "subgroups that the host updates for each one that the device updates, so that both end together",
    "Deep Optimizer States (Middleware '24), Equation 1, solved for k: k/U_c + k/D_c = 3/B + 1/U_g + k/(2 B)",
)

TRAFFIC = Formula(
    _TRAFFIC,
    "model sizes per step",
    (1 - topk_ratio) * (1 + 1 / update_interval),
    "deferred gradients go to the host at every step, their weights come back once per update window",
    "ZenFlow (arXiv 2505.12242), PCIe traffic: 1.125 at a ratio of 0.1 and an interval of 4, against 2 of ZeRO-Offload",
)

# Lanes: seconds of work per step.

_GRADIENTS = gradients_per_step + gradients_per_window / update_interval
_UPLOADS = uploads_per_window / update_interval
_LOADS = forward_loads + backward_loads + rewritten
_UPDATES = updates_per_window / update_interval + gradients_per_step
_FILES = files_per_window / update_interval

PLAN_TRAFFIC = Formula(
    _TRAFFIC,
    "model sizes per step",
    (_GRADIENTS + _UPLOADS) / model_bytes,
    "deferred gradients go to the host, their weights come back once per update window",
    "bytes over the link; streamed state is not counted",
)


def _lane(name: str, seconds: Expr, meaning: str) -> Formula:
    return Formula(Symbol(name, positive=True), "s", seconds, meaning, "bytes or parameters over a rate")


GRADIENTS = _lane("gradients", _GRADIENTS / devices / link_to_host, "gradients to the host")
GRADIENT_MEMORY = _lane("gradient_memory", _GRADIENTS / host_bandwidth, "gradients to the host, in host memory")
UPLOADS = _lane(
    "uploads",
    (_UPLOADS + state + _LOADS) / devices / link_to_device,
    "new weights, state and offloaded weights to the device",
)
FORWARD_LOADS = _lane(
    "forward_load",
    Max(0, forward_loads - loaded_ahead) / link_to_device,
    "offloaded weights that come in while the forward runs, because ring and staging buffers were full before",
)
BACKWARD_LOADS = _lane(
    "backward_load",
    Max(0, backward_loads - loaded_ahead) / link_to_device,
    "offloaded weights that come in while the backward runs",
)
REWRITES = _lane(
    "rewrites",
    Max(0, rewritten - loaded_ahead) / link_to_device,
    "offloaded weights that come in during the step, for an update on the device",
)
LATE_STATE = _lane(
    "late_state",
    (1 - prefetched) * state / devices / link_to_device,
    "streamed state that comes in after the backward, because the buffers were full",
)
LATE_UPLOADS = _lane(
    "late_uploads",
    (_UPLOADS + (1 - prefetched) * state) / devices / link_to_device,
    "the part of uploads that comes after the backward",
)
FLUSHES = _lane(
    "flushes", (state + rewritten) / devices / link_to_host, "streamed state and updated weights back to the host"
)
CORES = _lane(
    "cores",
    _UPDATES / HOST_PASS_BYTES / core_rate,
    f"host updates, {HOST_PASS_BYTES} bytes of which are one parameter of ``core_rate``",
)
HOST_MEMORY = _lane(
    "host_memory",
    (_UPDATES + _UPLOADS + _LOADS + rewritten + 2 * _FILES + 2 * state) / host_bandwidth,  # a file read fills memory
    "bytes of host updates, and of the copies next to them",
)
LATE_MEMORY = _lane("late_memory", (_UPDATES + _UPLOADS) / host_bandwidth, "bytes of host updates and uploads")
DISK = _lane(
    "disk",
    _FILES * (disk_read_byte + disk_write_byte),
    "state read from files and written back, with the seconds of one byte",
)
DEVICE_UPDATE = _lane(
    "device_update", updated_on_device * DEVICE_UPDATE_BYTES / devices / device_bandwidth, "updates on the device"
)
LANES = (
    *(GRADIENTS, GRADIENT_MEMORY, UPLOADS, FORWARD_LOADS, BACKWARD_LOADS, REWRITES),
    *(LATE_STATE, LATE_UPLOADS, FLUSHES),
    *(CORES, HOST_MEMORY, LATE_MEMORY, DISK, DEVICE_UPDATE),
)
"""What keeps each lane busy in one step. Lanes called ``late`` work after the backward."""

# Steps.

_FORWARD = Max(forward, gathers)
_BACKWARD = Max(backward, collectives)
_LOADED_FORWARD = Max(_FORWARD, FORWARD_LOADS.symbol)
_LOADED_BACKWARD = Max(_BACKWARD, BACKWARD_LOADS.symbol)
_COPIED_BACKWARD = Max(_LOADED_BACKWARD, copied_first * GRADIENTS.symbol, copied_first * GRADIENT_MEMORY.symbol)
_DEVICE_UPDATE = Max(DEVICE_UPDATE.symbol, LATE_STATE.symbol, REWRITES.symbol)
_LATE = (LATE_UPLOADS.symbol, CORES.symbol, LATE_MEMORY.symbol)
_BUSY = (
    GRADIENTS.symbol + FLUSHES.symbol,
    UPLOADS.symbol,
    CORES.symbol,
    GRADIENT_MEMORY.symbol + HOST_MEMORY.symbol,
    DISK.symbol,
    collectives + gathers,
)


def _fluid(symbol: Symbol, seconds: Expr, meaning: str) -> Formula:
    return Formula(symbol, "s", seconds, meaning, _FLUID)


DEVICE_TIME = _fluid(
    Symbol("device", positive=True),
    _FORWARD + _BACKWARD + DEVICE_UPDATE.symbol,
    "the step if the device never waited for its host",
)
FORWARD_TIME = _fluid(
    Symbol("hidden", positive=True),
    DEVICE_TIME.symbol - _BACKWARD,
    "the device's time between two backwards",
)
BLOCKING_UPDATE = _fluid(
    Symbol("update", positive=True),
    Max(_DEVICE_UPDATE, *_LATE),
    "an update that the step waits for, on host and device at once; files are read ahead and written behind",
)
BLOCKING_STEP = _fluid(
    _STEP,
    Max(_LOADED_FORWARD + _COPIED_BACKWARD + BLOCKING_UPDATE.expression, *_BUSY),
    "gradients are copied during the backward and updated after it; the next forward begins when every weight is there",
)
BLOCKING_IN_BACKWARD_STEP = _fluid(
    _STEP,
    Max(
        Max(forward, FORWARD_LOADS.symbol)
        + Max(_COPIED_BACKWARD + Max(_DEVICE_UPDATE, LATE_UPLOADS.symbol), CORES.symbol, LATE_MEMORY.symbol),
        *_BUSY,
    ),
    "the host updates from the first gradient of the backward on; the next forward begins when every weight is there",
)
OVERLAPPED_STEP = _fluid(
    _STEP,
    Max(_LOADED_FORWARD + _LOADED_BACKWARD + _DEVICE_UPDATE, *_BUSY),
    "windows are flushed all the time; the host has a whole step for each step's share of them",
)
FINAL_AT_STEP_TIME = _fluid(
    _STEP,
    Max(_COPIED_BACKWARD + Max(_DEVICE_UPDATE + _LOADED_FORWARD, *_LATE), *_BUSY),
    "gradients are final only after the backward: the host has the device's update and the next forward",
)

# The stall-free condition of overlapped update windows: each lane's work of a step fits into the time that hides it.


@dataclass(frozen=True, slots=True)
class WindowLane:
    """A lane that has less to do per step the longer the update window is.

    Attributes:
        per_window, per_step: seconds; a step takes ``per_window / update_interval + per_step``.
        time: seconds of a step that hide this work.
    """

    name: str
    per_window: Expr
    per_step: Expr
    time: Symbol

    @classmethod
    def of(cls, lane: Formula, time: Symbol = DEVICE_TIME.symbol, *others: Formula) -> WindowLane:
        """The lane with the work of ``others`` added."""
        terms = sympy.expand(sum((each.expression for each in others), lane.expression))
        per_window, per_step = (sympy.factor(terms.coeff(update_interval, power)) for power in (-1, 0))
        return cls(str(lane.symbol), per_window, per_step, time)

    @property
    def interval(self) -> Formula:
        """The update interval at which the lane is busy for just the time that hides it."""
        return Formula(
            Symbol(f"interval_{self.name}"),
            "steps",
            self.per_window / (self.time - self.per_step),
            f"the update window at which {self.name} takes just the time that hides it",
            f"per_window / update_interval + per_step = {self.time}, solved for the interval",
        )


@cache
def window_lanes(*, host_waits_for_backward: bool) -> tuple[WindowLane, ...]:
    """All lanes have the device's whole step; if host updates wait for the backward, late ones only what follows it."""
    whole = DEVICE_TIME.symbol
    found = {
        lane.name: lane
        for lane in (
            WindowLane.of(UPLOADS),
            WindowLane.of(CORES),
            WindowLane.of(HOST_MEMORY, whole, GRADIENT_MEMORY),
            WindowLane.of(DISK),
            WindowLane.of(GRADIENTS, whole, FLUSHES),
        )
    }
    if host_waits_for_backward:
        late = (WindowLane.of(lane, FORWARD_TIME.symbol) for lane in (LATE_UPLOADS, CORES, LATE_MEMORY))
        found |= {lane.name: lane for lane in late}
    return tuple(found.values())
