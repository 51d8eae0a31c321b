"""Controls the simulated accelerator: how late it runs, what it refuses, when it dies, and what the host waited for.

[Note: The simulated accelerator]
``torch.device("sim")`` is a device whose operators run later than the call that launches them, on their own thread,
in a seeded random order among all orders that the streams allow. Each operator runs the CPU kernel, so results equal
those of the CPU bit for bit, unless a wait is missing, memory is reused too early, or the host reads too soon.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from tests.simulated import device_module
from tests.simulated.library import library, library_with_gil
from tests.simulated.streams import Event, Stream

__all__ = ["Delays", "Event", "Simulator", "Stream", "load_simulator"]


@dataclass(frozen=True)
class Delays:
    """How often a stream is passed over although it could run: probabilities.

    A stream that is late still runs at full speed while it is the only one that can run and a host thread blocks. With
    1, it runs at no other time.

    Attributes:
        default: of the default stream.
        others: of all other streams.
        by_order: of the n-th stream made after ``configure``, from 1, in place of ``others``.
    """

    default: float = 0.0
    others: float = 0.0
    by_order: Mapping[int, float] = field(default_factory=dict)


PATTERNS: dict[str, Delays] = {
    "none": Delays(),
    "random": Delays(default=0.5, others=0.5),
    "compute late": Delays(default=0.95),
    "others late": Delays(others=0.95),
}


class Simulator:
    """The simulated accelerator of this process; see [Note: The simulated accelerator]."""

    device = torch.device("cpu")  # replaced when the device has its name

    def __init__(self) -> None:
        library().ask("start")
        device_module.register()
        self.device = torch.device(device_module.NAME, 0)
        # At exit, after the hooks that were registered later: those may still use the device.
        atexit.register(library().ask, "stop")

    def configure(
        self,
        *,
        seed: int = 0,
        delays: Delays | str = "none",
        limit: int = 0,
        in_order: bool = False,
        stream_values: bool = True,
        pinning: bool = True,
        registering: bool = True,
        capacity: int = 1 << 33,
    ) -> None:
        """Revive the device, drop what is queued, unregister host memory, reset the counts, and apply these options.

        Args:
            seed: of the order in which streams run.
            delays: or the name of one of ``PATTERNS``.
            limit: entries that fit into the launch queue; 0: any number.
            in_order: every item runs in the order of the launches, and a launch returns when its item has run.
            stream_values: whether ``write_value`` and ``wait_value`` are supported.
            pinning: whether host memory can be allocated as pinned.
            registering: whether host memory can be registered.
            capacity: bytes of device memory.
        """
        delays = PATTERNS[delays] if isinstance(delays, str) else delays
        count = len(delays.by_order)
        library().call(
            "configure",
            seed,
            limit,
            in_order,
            delays.default,
            delays.others,
            (ctypes.c_int64 * count)(*delays.by_order.keys()),
            (ctypes.c_double * count)(*delays.by_order.values()),
            count,
            stream_values,
            pinning,
            registering,
            capacity,
        )
        library().ask("exchange_stream", 0)
        device_module.manual_seed(seed)

    def delay(self, stream: torch.Stream, late: float) -> None:
        """Pass over ``stream`` with this probability from now on."""
        library().call("set_late", stream.stream_id, late)

    def run_others(self) -> None:
        """Block until no stream can run, but those that are late with probability 1."""
        library().call("run_others")

    def run_last(self) -> bool:
        """Run one item of a stream that is late with probability 1, if there is one, and all others that can run."""
        ran = ctypes.c_int()
        library().call("run_last", ctypes.byref(ran))
        return bool(ran.value)

    def counts(self) -> dict[str, int]:
        """How often the host waited for the device, by reason.

        ``D2H`` and ``H2D`` are blocking copies, ``D2H pageable`` is a non_blocking copy to memory that is not pinned,
        ``item`` is a number that the host reads, ``SLOW <operator>`` an operator without shapes in advance, which waits
        here only. ``LAYOUT <operator>`` is no wait: the operator's strides differ from those on the CPU.
        """
        lines = library().ask("counts").decode().splitlines()
        return {name: int(count) for count, name in (line.split(" ", 1) for line in lines)}

    def reset_counts(self) -> None:
        """Count from zero."""
        library().ask("reset_counts")

    def die(self, reason: str = "died by request") -> None:
        """Drop what is queued. From now on every launch, wait and query raises, in all threads."""
        library().ask("die", reason.encode())

    def die_after(self, items: int) -> None:
        """Die after this many more items have run."""
        library().ask("die_after", items)

    def register(self, address: int, size_bytes: int) -> None:
        """Make the device reach a range of host memory asynchronously, as cudaHostRegister does.

        Raises:
            RuntimeError: registration is refused, or the memory is registered already.
        """
        library().call("register", address, size_bytes)

    def unregister(self, address: int) -> None:
        """Undo ``register``.

        Raises:
            RuntimeError: nothing is registered at ``address``.
        """
        library().call("unregister", address)

    def registered_bytes(self) -> int:
        """Bytes of all registered ranges."""
        return int(library().ask("registered_bytes"))

    def write_value(self, stream: torch.Stream, address: int, value: int, *, inside: bool = False) -> None:
        """Make ``stream`` write the 32-bit ``value`` to pinned or registered memory after all earlier work in it.

        Args:
            inside: by software of the device, which has the operation also where programs do not.

        Raises:
            RuntimeError: not supported, or not an address of such memory.
        """
        library().call("write_value", stream.stream_id, address, value & 0xFFFFFFFF, inside)

    def wait_value(self, stream: torch.Stream, address: int, value: int, *, inside: bool = False) -> None:
        """Make ``stream`` wait until the 32-bit number at ``address`` reaches ``value``, modulo 2**32.

        Args:
            inside: see ``write_value``.

        Raises:
            RuntimeError: not supported, or not an address of pinned or registered memory.
        """
        library().call("wait_value", stream.stream_id, address, value & 0xFFFFFFFF, inside)

    def launch_noop(self, stream: torch.Stream, *, hold_gil: bool = False) -> None:
        """Queue an item that does nothing.

        Args:
            hold_gil: keep the GIL while the call blocks on a full queue, as launches in Inductor's code do.
        """
        (library_with_gil() if hold_gil else library()).call("launch_noop", stream.stream_id)

    def write_when_full(self, address: int) -> None:
        """Write 1 to a number in pinned memory as soon as a launch blocks on the full queue, and no stream can run."""
        library().ask("write_when_full", address)

    def free_bytes(self) -> int:
        """Device memory that no tensor has."""
        return device_module.mem_get_info()[0]

    def dump(self) -> str:
        """The streams' heads, for people who look for a hang."""
        return str(library().ask("dump").decode())

    def dump_on_signal(self, number: int, path: str) -> None:
        """Write ``dump()`` to a file at this signal, even while a thread keeps the GIL."""
        library().ask("dump_on_signal", number, path.encode())


@cache
def load_simulator() -> Simulator:
    """Make the device of this process; the first call may compile it, in about 15 seconds."""
    return Simulator()
