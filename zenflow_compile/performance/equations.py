"""The equations of optimizer offloading, symbolic, each with its meaning and source; solved where that is an inverse.

The model of a step is a fluid one. Lanes (device, link each way, cores, host memory, disk, peers) work side by side. A
step takes at least what keeps any lane busy, and where the schedule puts work after the backward, at least the phases
one after the other, each as long as its busiest lane. So it is a lower bound of the schedule that ``simulate`` runs;
what a timeline adds (blocks of finite size, rings that fill up, merges, cores that copies take) only makes it longer.
Updates and copies share the host's memory, so its lane carries both; the model of Deep Optimizer States leaves that
out, and promises 1.25 to 1.5 times the throughput that its authors measured.

Times are seconds, sizes bytes, rates per second; a *parameter* is one element. Bandwidths of memory count reads and
writes together, those of a link one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import sympy
from sympy import Eq, Expr, Max, Symbol

from zenflow_compile.performance.formula import Formula, positive_symbols
from zenflow_compile.performance.shares import topk_ratio
from zenflow_compile.performance.workload import DEVICE_UPDATE_BYTES, HOST_PASS_BYTES
from zenflow_compile.planning.plan import STATE_BYTES

# What a plan decides: see ``shares``.
offloaded, streamed, selected, resident, in_files = positive_symbols("offloaded streamed selected resident in_files")
kept_in_window, prefetched, copied_first = positive_symbols("kept_in_window prefetched copied_first")
buffer_bytes, summed, slots = positive_symbols("buffer_bytes summed slots")
held_bytes, uploads_kept, weight_bytes = positive_symbols("held_bytes uploads_kept weight_bytes")
whole_state, update_interval = positive_symbols("whole_state update_interval")
# What a model and a machine bring. A device owns the optimizer state of ``owned`` parameters and has its own link;
# cores, host memory and disk are the node's, for all its ``devices``.
owned, devices, forward, backward, collectives = positive_symbols("owned devices forward backward collectives")
gathers = Symbol("gathers", positive=True)
link_to_host, link_to_device, device_bandwidth = positive_symbols("link_to_host link_to_device device_bandwidth")
host_bandwidth, core_rate = positive_symbols("host_bandwidth core_rate")
disk_read_byte, disk_write_byte = positive_symbols("disk_read_byte disk_write_byte")

_ALLOCATED = "what ParamPlan counts and the runtime allocates"
_FLUID = "fluid limit, a lower bound: no lane works less, and no phase is shorter than its busiest lane"
_CLOSING = offloaded / update_interval  # updated on the host in one step, on average
_SENT = buffer_bytes * (1 - summed + summed / update_interval)  # per step, of a gradient that is offloaded


# The stride of Deep Optimizer States, and ZenFlow's traffic.


def _solved_stride() -> Expr:
    """Solve the balance of Deep Optimizer States (Middleware '24), Equation 1, for the CPU-to-GPU ratio k.

    In the time in which the GPU updates one subgroup, the CPU updates k. Per parameter of a subgroup::

        GPU side:  3/B + 1/U_g + k/(2 B)     state of three fp32 tensors comes in, is updated; the k subgroups of the
                                             CPU come in as 16-bit weights over the same link. Flushing state uses the
                                             other direction.
        CPU side:  k (1/U_c + 1/D_c)         update, then the cast to 16 bits

    All rates are parameters per second; B is that of fp32 values over the link.
    """
    k, cpu_update, gpu_update, link, cpu_downscale = positive_symbols("k cpu_update gpu_update link cpu_downscale")
    gpu_side = 3 / link + 1 / gpu_update + k / (2 * link)
    cpu_side = k / cpu_update + k / cpu_downscale
    # Unchecked and as it comes out: tidying it up takes a quarter of a second of every import.
    (solution,) = sympy.solve(Eq(cpu_side, gpu_side), k, check=False, simplify=False)
    return _arranged(solution, (3 / link + 1 / gpu_update) / (1 / cpu_update + 1 / cpu_downscale - 1 / (2 * link)))


def _arranged(solution: Expr, readable: Expr) -> Expr:
    """``readable``, which is ``solution``: solve() clears the fractions that give its terms their meaning."""
    assert sympy.simplify(solution - readable) == 0
    return readable


STRIDE_RATIO = Formula(
    "stride_ratio",
    _solved_stride(),
    "subgroups that the host updates for each one that the device updates, so that both end together",
    "Deep Optimizer States (Middleware '24), Equation 1: CPU side = GPU side, solved for k",
)

TRAFFIC = Formula(
    "traffic [model sizes per step]",
    (1 - topk_ratio) * (1 + 1 / update_interval),
    "gradients of what is not selected go to the host at every step, their weights come back once per window",
    "ZenFlow (arXiv 2505.12242), PCIe traffic: 1.125 at a ratio of 0.1 and an interval of 4, against 2 of ZeRO-Offload",
)


# What every plan costs: traffic, bytes per parameter, and the lanes of a step.

PLAN_TRAFFIC = Formula(
    "traffic [model sizes per step]",
    (offloaded * _SENT + _CLOSING * weight_bytes) / weight_bytes,
    "gradients of what is offloaded go to the host, their weights come back once per window",
    "bytes over the link; streamed state is not counted",
)

BYTES: Mapping[str, Formula] = {
    "device": Formula(
        "device_bytes [per parameter]",
        selected * STATE_BYTES + resident * whole_state + offloaded * held_bytes,
        "state of the lines that the device updates for good, and of what is resident",
        _ALLOCATED,
    ),
    "host": Formula(
        "host_bytes [per parameter]",
        offloaded * (STATE_BYTES * (1 - in_files) + slots * buffer_bytes + uploads_kept * weight_bytes)
        + streamed * whole_state,
        "state, gradient slots and upload buffers of what is offloaded, and state of what is streamed",
        _ALLOCATED,
    ),
    "file": Formula(
        "file_bytes [per parameter]",
        offloaded * STATE_BYTES * in_files,
        "state of what is offloaded, where it lives in files",
        _ALLOCATED,
    ),
}

_NODE = devices * owned
# A host update reads and writes.
_WINDOW_BYTES = 2 * STATE_BYTES + buffer_bytes * (update_interval * (1 - summed) + summed) + weight_bytes
_PASSING_FILES = STATE_BYTES * in_files * (2 - kept_in_window)  # a read fills host memory, a write empties it
_WORK: Mapping[str, tuple[Expr, str]] = {
    "gradients": (owned * offloaded * _SENT / link_to_host, "gradients to the host"),
    "gradient_memory": (_NODE * offloaded * _SENT / host_bandwidth, "the same, in host memory"),
    "uploads": (
        owned * (_CLOSING * weight_bytes + streamed * whole_state) / link_to_device,
        "new weights, and state that passes through, to the device",
    ),
    "late_state": (
        owned * streamed * (1 - prefetched) * whole_state / link_to_device,
        "of that the state that comes in after the backward, because buffers were full",
    ),
    "late_uploads": (
        owned * (_CLOSING * weight_bytes + streamed * (1 - prefetched) * whole_state) / link_to_device,
        "of uploads what comes after the backward",
    ),
    "flushes": (owned * streamed * whole_state / link_to_host, "state that passed through, to the host"),
    "cores": (
        _NODE * _CLOSING * _WINDOW_BYTES / HOST_PASS_BYTES / core_rate,
        f"arithmetic of the host's updates, {HOST_PASS_BYTES} bytes of which are a parameter of ``core_rate``",
    ),
    "host_memory": (
        _NODE
        * (_CLOSING * (_WINDOW_BYTES + weight_bytes + _PASSING_FILES) + 2 * streamed * whole_state)
        / host_bandwidth,
        "bytes of the host's updates and of the copies beside them",
    ),
    "late_memory": (
        _NODE * _CLOSING * (_WINDOW_BYTES + weight_bytes) / host_bandwidth,
        "of that the host's updates and uploads",
    ),
    "disk": (
        _NODE * _CLOSING * in_files * STATE_BYTES * ((1 - kept_in_window) * disk_read_byte + disk_write_byte),
        "state read from files and written back, so many seconds for each byte",
    ),
    "device_update": (
        owned * (streamed + selected + resident) * DEVICE_UPDATE_BYTES / device_bandwidth,
        "updates on the device",
    ),
}

LANES: Mapping[str, Formula] = {
    name: Formula(f"{name} [s]", expression, meaning, "bytes or parameters over a rate")
    for name, (expression, meaning) in _WORK.items()
}
"""What keeps each lane busy in one step, in seconds, by lane: ``gradients``, ``uploads`` and ``flushes`` are copies
over a device's link, ``gradient_memory`` and ``host_memory`` bytes that copies and updates touch in the host's memory.
What is ``late`` comes after the backward."""

_LANE: Mapping[str, Symbol] = {name: Symbol(name, positive=True) for name in LANES}
_FORWARD = Max(forward, gathers)
_BACKWARD = Max(backward, collectives)
_COPIED_BACKWARD = Max(_BACKWARD, copied_first * _LANE["gradients"], copied_first * _LANE["gradient_memory"])
_DEVICE_UPDATE = Max(_LANE["device_update"], _LANE["late_state"])
_BUSY = (
    _LANE["gradients"] + _LANE["flushes"],
    _LANE["uploads"],
    _LANE["cores"],
    _LANE["gradient_memory"] + _LANE["host_memory"],
    _LANE["disk"],
    collectives + gathers,
)

DEVICE_TIME = Formula(
    "device [s]",
    _FORWARD + _BACKWARD + _LANE["device_update"],
    "the step if the device never waited for its host",
    _FLUID,
)
BLOCKING_UPDATE = Formula(
    "update [s]",
    Max(_DEVICE_UPDATE, _LANE["late_uploads"], _LANE["cores"], _LANE["late_memory"]),
    "an update that the step waits for, on host and device at once; files are read ahead, state goes back later",
    _FLUID,
)
BLOCKING_STEP = Formula(
    "step [s]",
    Max(_FORWARD + _COPIED_BACKWARD + BLOCKING_UPDATE.expression, *_BUSY),
    "gradients are copied during the backward and updated after it; the next forward begins when every weight is there",
    _FLUID,
)
BLOCKING_IN_BACKWARD_STEP = Formula(
    "step [s]",
    Max(
        forward
        + Max(
            _COPIED_BACKWARD + Max(_DEVICE_UPDATE, _LANE["late_uploads"]),
            _LANE["cores"],
            _LANE["late_memory"],
        ),
        *_BUSY,
    ),
    "the host updates from the first gradient of the backward on; the next forward begins when every weight is there",
    _FLUID,
)
OVERLAPPED_STEP = Formula(
    "step [s]",
    Max(_FORWARD + _BACKWARD + _DEVICE_UPDATE, *_BUSY),
    "windows close all the time; the host has a whole step for each step's share of them",
    _FLUID,
)
FINAL_AT_STEP_TIME = Formula(
    "step [s]",
    Max(
        _COPIED_BACKWARD + Max(_DEVICE_UPDATE + _FORWARD, _LANE["late_uploads"], _LANE["cores"], _LANE["late_memory"]),
        *_BUSY,
    ),
    "gradients are final only after the backward, so that the host has the device's update and the next forward",
    _FLUID,
)


# The stall-free condition of overlapped windows: every lane's work of a step fits into the time that hides it.

hidden, device = positive_symbols("hidden device")


@cache
def windowed_lanes(final_at_step: bool) -> Mapping[str, tuple[Expr, Symbol]]:
    """Lanes that may have less to do per step the longer the window is: seconds, and what hides them.

    All of them have the device's whole step; with ``final_at_step`` what is late has only that between two backwards.
    """
    found = {name: (LANES[name].expression, device) for name in ("uploads", "cores", "host_memory", "disk")}
    found["downloads"] = (LANES["gradients"].expression + LANES["flushes"].expression, device)
    found["host_memory"] = (LANES["host_memory"].expression + LANES["gradient_memory"].expression, device)
    if final_at_step:
        found |= {name: (LANES[name].expression, hidden) for name in ("late_uploads", "cores", "late_memory")}
    return found


@cache
def window_parts(lane: str, final_at_step: bool) -> tuple[Formula, Formula]:
    """Seconds of the lane ``a / update_interval + c``: its ``a``, once per window, and ``c``, at every step."""
    terms = sympy.expand(windowed_lanes(final_at_step)[lane][0])
    return (
        Formula(
            f"{lane}_per_window",
            sympy.factor(terms.coeff(update_interval, -1)),
            f"seconds that {lane} needs once per window",
            "the lane's terms with the interval",
        ),
        Formula(
            f"{lane}_per_step",
            sympy.factor(terms.coeff(update_interval, 0)),
            f"seconds that {lane} needs at every step",
            "the lane's terms without the interval",
        ),
    )


@cache
def interval_formula(lane: str, final_at_step: bool) -> Formula:
    """The interval at which the lane is busy for just the time that hides it."""
    per_window, per_step = positive_symbols(f"{lane}_per_window {lane}_per_step")
    time = windowed_lanes(final_at_step)[lane][1]
    (solution,) = sympy.solve(Eq(per_window / update_interval + per_step, time), update_interval)
    return Formula(
        f"interval_{lane} [steps]",
        _arranged(solution, per_window / (time - per_step)),
        f"the window at which {lane} is busy for just the time that hides it",
        f"stall-free condition {lane} = {time}, solved for the interval",
    )
