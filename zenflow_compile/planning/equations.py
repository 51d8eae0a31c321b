"""The equations of optimizer offloading, symbolic, each with its meaning and source; solved where that is an inverse.

The model of a step is a fluid one. Lanes (device, link each way, cores, host memory, disk) work side by side, so a
phase lasts as long as its busiest lane: the best that any schedule reaches. What a timeline adds (blocks of finite
size, rings that fill up) is for ``simulate``. Updates and copies share the host's memory, so its lane carries both; the
model of Deep Optimizer States leaves that out, and promises 1.25 to 1.5 times the throughput that its authors measured.

Times are seconds, sizes bytes, rates per second; a *parameter* is one element. Bandwidths of memory count reads and
writes together, those of a link one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import sympy
from sympy import Eq, Expr, Max, Rational, Symbol

from zenflow_compile.planning.formula import Formula, positive_symbols
from zenflow_compile.planning.shares import SHARES, STATE_BYTES, topk_ratio, update_interval
from zenflow_compile.planning.workload import DEVICE_UPDATE_BYTES

SLOT_COST = Rational(12, 100)
"""What each further gradient of a window adds to a core's time per parameter, as a share of its time at one gradient:
0.57, 0.41 and 0.31 billion parameters per second at 1, 4 and 8 (``benchmarks/results/host_adam.json``, bf16)."""

# What a plan decides, beside the knobs of ``shares``.
staleness, in_files, weight_bytes, whole_state = positive_symbols("staleness in_files weight_bytes whole_state")
# What a model and a machine bring. A device owns the optimizer state of ``owned`` parameters and has its own link;
# cores, host memory and disk are the node's, for all its ``devices``.
owned, devices, forward, backward, collectives = positive_symbols("owned devices forward backward collectives")
link_to_host, link_to_device, device_bandwidth = positive_symbols("link_to_host link_to_device device_bandwidth")
host_bandwidth, core_rate, disk_byte = positive_symbols("host_bandwidth core_rate disk_byte")

_ALLOCATED = "what ParamPlan counts and the runtime allocates"
_FLUID = "fluid limit: a phase lasts as long as its busiest lane"


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


# What every policy costs: bytes per parameter, and the lanes of a step.


@cache
def bytes_formulas(policy: str) -> tuple[Formula, Formula, Formula]:
    """Bytes per parameter on the device, on the host and in files."""
    shares = SHARES[policy]
    slots = (update_interval + staleness) * weight_bytes
    uploads = (1 + staleness) * weight_bytes
    return (
        Formula(
            "device_bytes [per parameter]",
            shares.selected * STATE_BYTES + shares.resident * whole_state,
            "state of the lines that the device updates for good, and of what is resident",
            _ALLOCATED,
        ),
        Formula(
            "host_bytes [per parameter]",
            shares.offloaded * (STATE_BYTES * (1 - in_files) + slots + uploads) + shares.streamed * whole_state,
            "state, gradient slots and upload buffers of what is offloaded, and state of what is streamed",
            _ALLOCATED,
        ),
        Formula(
            "file_bytes [per parameter]",
            shares.offloaded * STATE_BYTES * in_files,
            "state of what is offloaded, where it lives in files",
            _ALLOCATED,
        ),
    )


@cache
def lanes(policy: str) -> Mapping[str, Formula]:
    """What keeps each lane busy in one step, in seconds, by lane.

    ``gradients``, ``uploads`` and ``flushes`` are copies over a device's link; ``gradient_memory`` and ``host_memory``
    what copies and updates read and write in the host's memory; ``cores`` the arithmetic of host updates.
    """
    shares = SHARES[policy]
    node = devices * owned
    window_bytes = 2 * STATE_BYTES + (update_interval + 1) * weight_bytes  # a host update reads and writes
    passing_files = 2 * STATE_BYTES * in_files  # a read fills host memory, a write empties it
    expressions = {
        "gradients": (owned * shares.offloaded * weight_bytes / link_to_host, "gradients to the host"),
        "gradient_memory": (node * shares.offloaded * weight_bytes / host_bandwidth, "the same, in host memory"),
        "uploads": (
            owned * (shares.closing * weight_bytes + shares.streamed * whole_state) / link_to_device,
            "new weights, and state that passes through, to the device",
        ),
        "flushes": (owned * shares.streamed * whole_state / link_to_host, "state that passed through, to the host"),
        "cores": (
            node * shares.closing * (1 + SLOT_COST * (update_interval - 1)) / core_rate,
            "arithmetic of the host's updates",
        ),
        "host_memory": (
            node
            * (shares.closing * (window_bytes + weight_bytes + passing_files) + 2 * shares.streamed * whole_state)
            / host_bandwidth,
            "bytes of the host's updates and of the copies beside them",
        ),
        "disk": (
            node * shares.closing * in_files * STATE_BYTES * disk_byte,
            "state read from files and written back, ``disk_byte`` seconds for each byte of both",
        ),
        "device_update": (
            owned * shares.on_device * DEVICE_UPDATE_BYTES / device_bandwidth,
            "updates on the device",
        ),
    }
    return {
        name: Formula(f"{name} [s]", expression, meaning, "bytes or parameters over a rate")
        for name, (expression, meaning) in expressions.items()
    }


_LANE: Mapping[str, Symbol] = {name: Symbol(name, positive=True) for name in lanes("resident")}
_BACKWARD = Max(backward, collectives, _LANE["gradients"], _LANE["gradient_memory"])
_UPDATES = (_LANE["uploads"], _LANE["flushes"], _LANE["cores"], _LANE["host_memory"], _LANE["disk"])

DEVICE_TIME = Formula(
    "device [s]",
    Max(forward, collectives) + Max(backward, collectives) + _LANE["device_update"],
    "the step if the device never waited for its host",
    _FLUID,
)
BLOCKING_UPDATE = Formula(
    "update [s]",
    Max(_LANE["device_update"], *_UPDATES),
    "an update that the step waits for, on host and device at the same time",
    _FLUID,
)
BLOCKING_STEP = Formula(
    "step [s]",
    Max(forward, collectives) + _BACKWARD + BLOCKING_UPDATE.expression,
    "gradients are copied during the backward; the next forward begins when every weight is there",
    _FLUID,
)
OVERLAPPED_STEP = Formula(
    "step [s]",
    Max(
        DEVICE_TIME.expression,
        _LANE["gradients"] + _LANE["flushes"],
        _LANE["uploads"],
        _LANE["cores"],
        _LANE["gradient_memory"] + _LANE["host_memory"],
        _LANE["disk"],
    ),
    "windows close all the time; the host has a whole step for each step's share of them",
    _FLUID,
)
FINAL_AT_STEP_TIME = Formula(
    "step [s]",
    _BACKWARD + _LANE["device_update"] + Max(forward, collectives, *_UPDATES),
    "gradients are final only after the backward, so that the host has the next forward: first layers first",
    _FLUID,
)


# The stall-free condition of ``zenflow``: every lane's work of a step fits into the time that hides it.

hidden = Symbol("hidden", positive=True)
WINDOWED_LANES = ("uploads", "cores", "host_memory", "disk")
"""Lanes that have less to do per step the longer the window is."""


@cache
def window_parts(lane: str, final_at_step: bool) -> tuple[Formula, Formula]:
    """Seconds of the lane ``a / update_interval + c``: its ``a``, once per window, and ``c``, at every step.

    With ``final_at_step`` updates wait for the end of the backward, and no gradient is copied beside them.
    """
    time = lanes("zenflow")[lane].expression
    if lane == "host_memory" and not final_at_step:
        time += lanes("zenflow")["gradient_memory"].expression
    terms = sympy.expand(time)
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
def interval_formula(lane: str) -> Formula:
    """The interval at which the lane is busy for just the time that hides it."""
    per_window, per_step = positive_symbols(f"{lane}_per_window {lane}_per_step")
    (solution,) = sympy.solve(Eq(per_window / update_interval + per_step, hidden), update_interval)
    return Formula(
        f"interval_{lane} [steps]",
        _arranged(solution, per_window / (hidden - per_step)),
        f"the window at which {lane} is busy for just the time that hides it",
        f"stall-free condition {lane} = hidden, solved for the interval",
    )
