"""Measures the rates of memory, links and update kernels of this machine, with the runtime's own parts.

Bytes are counted as the plan counts them: those that must be read or written. A processor also reads the lines that it
overwrites (write-allocate), which is not counted. That is a third of the traffic of ``copy_``, so host Adam may reach
more than 1.0 of ``copy_``; ``add_``, in place like most of Adam, is the better roof.

Threads are pinned as workers are. Each has a contiguous part of the memory, which it touched first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile.performance.hardware import Bandwidths
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.thread_lane import copy_without_gil
from zenflow_compile.runtime.device_updates import column_ops
from zenflow_compile.runtime.device_updates.resident_updates import ResidentState, update_on_device
from zenflow_compile.runtime.device_updates.selection import Selection, SliceState
from zenflow_compile.runtime.host.arena import HostArena, available_host_memory, carved_bytes
from zenflow_compile.runtime.host.cores import choose_cores, last_level_cache_bytes, physical_cores, run_pinned
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
from zenflow_compile.runtime.update_rule import StepCoefficients
from zenflow_compile.torch_internals import torch_private

WINDOW_GRADIENTS = 4
"""Gradients per update window in the measurement of host Adam: the default of ``update_interval``."""

ADAM_BYTES = 2 * 3 * 4 + 2 * WINDOW_GRADIENTS + 2
"""Bytes per parameter of host Adam: fp32 master and moments read and written, bf16 gradients read, bf16 out written."""

DEVICE_ADAM_BYTES = 2 * 3 * 4 + 2 + 2
"""Bytes per parameter of device Adam, which has one gradient."""

_ADAM_MEMORY_BYTES = 3 * 4 + 2 * WINDOW_GRADIENTS + 2  # memory per parameter of host Adam's measurement
_CACHES = 3  # a measurement should go through this multiple of the last-level cache
_SMALLEST_BYTES, _LARGEST_BYTES = 256 << 20, 2 << 30
_MEMORY_SHARE = 4  # at most a quarter of what is available
_LINK_BYTES = 256 << 20
_QUICK_BYTES, _QUICK_LINK_BYTES, _QUICK_ROUNDS = 512 << 20, 64 << 20, 3
_BUDGET_SECONDS = 2.0  # per measurement: no further round begins after it
_SMALLEST_MATRIX, _LARGEST_MATRIX = 256, 4096  # width: the largest takes 100 MB in 16 bits
_MATMUL_SECONDS = 0.01  # a product that takes this long is large enough; the next would take eight times as long
_COLUMNS_PER_SELECTED = 10
# Of a resident parameter: beyond the caches, and long next to a kernel's start.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 22, 1 << 26
_RESIDENT_ROUNDS = 15  # short ones; the first few wait for pages
_RESIDENT_BYTES = 16  # memory per element: weight, gradient and moments, and an fp32 master or wider weights
_COEFFICIENTS = StepCoefficients.known(lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.01)


@dataclass(frozen=True, slots=True)
class HostRates:
    """The rates of ``threads`` threads together in host memory, in bytes per second, without write-allocate.

    Attributes:
        copy: ``Tensor.copy_``, 8 bytes per fp32 element.
        add: ``Tensor.add_``, in place, 12 bytes per fp32 element.
        adam: the host update of an update window of 4 bf16 gradients, 34 bytes per parameter.
        parameters: parameters per second of that update.
    """

    threads: int
    copy: float
    add: float
    adam: float
    parameters: float

    @property
    def adam_to_copy(self) -> float:
        """Bandwidth of host Adam as a multiple of that of ``copy_``, with the same threads in the same rounds."""
        return self.adam / self.copy


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Copies between device and host, in payload bytes per second.

    Attributes:
        memory: ``"pinned"`` or ``"unpinned"`` host memory; ``"memmove"`` where the device is the CPU, whose copy lanes
            are threads.
    """

    memory: str
    to_host: float
    to_device: float


@dataclass(frozen=True, slots=True)
class DeviceRate:
    """AdamW on the device: parameters and bytes (28 each) per second."""

    parameters: float
    bytes: float


@cache  # measure once per process: reports are printed often, and the machine stays the same
def rates(device: torch.device, cores: tuple[int, ...]) -> Bandwidths:
    """Measure the rates that bound host updates on logical ``cores`` and copies, in about a second."""
    host = HostMemory(_fitting(_QUICK_BYTES), len(cores))
    _in_threads(cores, host.fill)
    seconds = median(in_turns({"add": partial(_in_threads, cores, host.add)}, _QUICK_ROUNDS)["add"])
    elements = host.elements
    del host
    link = link_rates(device, _fitting(_QUICK_LINK_BYTES), _QUICK_ROUNDS)[0]
    return Bandwidths(host=12 * elements / seconds, to_host=link.to_host, to_device=link.to_device)


def host_rates(threads: int, total_bytes: int, rounds: int) -> HostRates:
    """Measure ``total_bytes`` of host memory with ``threads`` threads, at most one per physical core: medians."""
    cores = choose_cores(physical_cores(), threads, {})
    host = HostMemory(total_bytes, threads, HostKernel(torch.bfloat16, torch.bfloat16, WINDOW_GRADIENTS))
    _in_threads(cores, host.fill)
    works = {"copy": host.copy, "add": host.add, "adam": host.adam}
    seconds = in_turns({name: partial(_in_threads, cores, work) for name, work in works.items()}, rounds)
    copied, added, updated = (host.elements / median(seconds[name]) for name in works)  # per second
    return HostRates(threads, 8 * copied, 12 * added, ADAM_BYTES * updated, updated)


def link_rates(device: torch.device, size_bytes: int, rounds: int) -> list[LinkRates]:
    """Measure the link between ``device`` and the host, pinned memory first; the directions take turns.

    Pinned memory is left out if the driver refuses to pin it. Where the device is the CPU, one thread's memmove stands
    for the link, and there is one entry.
    """
    served = device_of(device)
    if served.streams is None:
        return [_link(device, HostArena(2 * size_bytes), "memmove", size_bytes, rounds)]
    found = []
    pinned, unpinned = HostArena(size_bytes), HostArena(size_bytes)
    if pinned.pin(served):
        found.append(_link(device, pinned, "pinned", size_bytes, rounds))
    pinned.close()
    return [*found, _link(device, unpinned, "unpinned", size_bytes, rounds)]


def device_rate(device: torch.device, rounds: int, slices: int | None = None, length: int = 4096) -> DeviceRate:
    """Measure ``update_slices_`` on a tenth of the columns of a bf16 matrix ``[length, slices]``.

    By default it is larger than a GPU's cache, and smaller where the device is the CPU.
    """
    on_gpu = device_of(device).streams is not None
    calls = 10 if on_gpu else 1  # a call on a GPU is short next to the wait for it
    slices = slices or (16384 if on_gpu else 4096)
    k = max(1, slices // _COLUMNS_PER_SELECTED)
    matrix = torch.zeros(length, slices, dtype=torch.bfloat16, device=device)
    spread = torch.arange(k, dtype=torch.int32, device="cpu") * (slices // k)  # selections spread over the matrix, too
    selection = Selection.of(spread, slices, device)
    gradient = torch.ones(k, length, dtype=torch.bfloat16, device=device)
    master, *moments = (torch.ones(k, length, device=device) for _ in range(3))
    state = SliceState(matrix, 1, selection, gradient, master, tuple(moments), step=1)

    def update() -> None:
        for _ in range(calls):
            column_ops.update_columns_([state], _COEFFICIENTS)

    return _rate_of(device, update, calls * k * length, rounds)


def resident_rate(device: torch.device, dtype: torch.dtype, free_bytes: int) -> DeviceRate:
    """Measure AdamW on a resident parameter, in at most half of the device's ``free_bytes``.

    Planning calls this rate the device's bandwidth.
    """
    elements = _CPU_ELEMENTS if device_of(device).streams is None else _GPU_ELEMENTS
    elements = max(1, min(elements, free_bytes // (2 * _RESIDENT_BYTES)))
    param = Parameter(torch.ones(elements, dtype=dtype, device=device))
    resident = (param, torch.ones_like(param), ResidentState.zeros_like(param))
    return _rate_of(device, partial(update_on_device, [resident], _COEFFICIENTS), elements, _RESIDENT_ROUNDS)


def _rate_of(device: torch.device, update: Callable[[], None], elements: int, rounds: int) -> DeviceRate:
    """The rate of ``update``, one call of which updates ``elements`` parameters."""
    seconds = in_turns({"update": partial(_seconds, device, update)}, rounds)["update"]
    per_second = elements / median(seconds)
    return DeviceRate(parameters=per_second, bytes=DEVICE_ADAM_BYTES * per_second)


@cache
@torch.no_grad()
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a product of two square matrices that takes at least 10 ms, or is of the largest width."""
    width = _SMALLEST_MATRIX
    while True:
        matrix = torch.ones(width, width, dtype=dtype, device=device)
        product = partial(torch.mm, matrix, matrix)
        # The first round starts threads and loads kernels; another process may have interrupted the slower ones.
        fastest = min(_seconds(device, product) for _ in range(1 + _QUICK_ROUNDS))
        if fastest >= _MATMUL_SECONDS or width == _LARGEST_MATRIX:
            return 2.0 * width**3 / fastest
        width *= 2


def default_bytes() -> int:
    """Bytes of memory to measure host rates in: well above the last-level cache, at most a quarter of what is free."""
    # copy_ goes through the fewest bytes: two fp32 tensors.
    wanted = _CACHES * last_level_cache_bytes() * _ADAM_MEMORY_BYTES // 8
    return _fitting(min(max(wanted, _SMALLEST_BYTES), _LARGEST_BYTES))


def default_link_bytes() -> int:
    """Bytes per copy between device and host: large enough that the start of a copy does not show."""
    return _fitting(_LINK_BYTES)


def _fitting(wanted_bytes: int) -> int:
    return min(wanted_bytes, available_host_memory()[0] // _MEMORY_SHARE)


class HostMemory:
    """Host memory like a parameter's, and the work of each thread on its part.

    It is filled with ones, which stay far from overflow and from slow denormal numbers; a processor may skip zeros.
    Without a kernel there is only the memory for ``add``.

    Attributes:
        state: fp32 tensors; narrow: the new weights and the gradients, in bf16.
    """

    def __init__(self, total_bytes: int, threads: int, kernel: HostKernel | None = None) -> None:
        self._kernel = kernel
        fp32, bf16 = (2, 0) if kernel is None else (3, WINDOW_GRADIENTS + 1)
        size = max(64, total_bytes // (4 * fp32 + 2 * bf16) // threads // 64 * 64)
        self.elements = size * threads
        self._parts = [slice(index * size, (index + 1) * size) for index in range(threads)]
        pieces = [((self.elements,), torch.float32)] * fp32 + [((self.elements,), torch.bfloat16)] * bf16
        arena = HostArena(carved_bytes(pieces))
        tensors = [arena.take(*piece) for piece in pieces]
        self.state, self.narrow = tensors[:fp32], tensors[fp32:]

    def fill(self, index: int) -> None:
        """Touch the part of a thread, so that its pages are near to its core, and are not all one page of zeros."""
        with torch_private.one_intra_op_thread():
            for tensor in (*self.state, *self.narrow):
                tensor[self._parts[index]].fill_(1.0)

    def copy(self, index: int) -> None:
        part = self._parts[index]
        with torch_private.one_intra_op_thread():
            self.state[2][part].copy_(self.state[1][part])

    def add(self, index: int) -> None:
        part = self._parts[index]
        with torch_private.one_intra_op_thread():
            self.state[0][part].add_(self.state[1][part], alpha=1e-6)

    def adam(self, index: int) -> None:
        assert self._kernel is not None
        out, *window = self.narrow
        coefficients = [_COEFFICIENTS] * WINDOW_GRADIENTS
        update = WindowUpdate(self.state, out, window, coefficients, step=WINDOW_GRADIENTS)
        self._kernel(update, self._parts[index])


def _link(device: torch.device, arena: HostArena, memory: str, size_bytes: int, rounds: int) -> LinkRates:
    on_host = arena.take((size_bytes,), torch.uint8).fill_(1)
    copy: Callable[[Tensor, Tensor], object]
    if device_of(device).streams is not None:
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        copy = partial(Tensor.copy_, non_blocking=True)
    else:
        on_device = arena.take((size_bytes,), torch.uint8).fill_(1)
        copy = copy_without_gil
    works = {"down": partial(copy, on_host, on_device), "up": partial(copy, on_device, on_host)}
    seconds = in_turns({name: partial(_seconds, device, work) for name, work in works.items()}, rounds)
    return LinkRates(memory, size_bytes / median(seconds["down"]), size_bytes / median(seconds["up"]))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes, from an idle device to an idle device."""
    device_of(device).synchronize()
    begin = time.perf_counter()
    work()
    device_of(device).synchronize()
    return time.perf_counter() - begin


def _in_threads(cores: Sequence[int], work: Callable[[int], None]) -> float:
    """Seconds from the first thread's begin to the last one's end."""
    begins, ends = [0.0] * len(cores), [0.0] * len(cores)

    def timed(index: int) -> None:
        begins[index] = time.perf_counter()
        work(index)
        ends[index] = time.perf_counter()

    run_pinned(cores, timed)
    return max(ends) - min(begins)


def in_turns(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in each round. The works take turns, so that a slow minute of the machine slows all of them.

    One more round comes first and does not count: it makes pages resident and compiles kernels. If rounds take long,
    there are fewer, but at least one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + _BUDGET_SECONDS
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() > end:
            break
        for name, work in works.items():
            elapsed = work()
            if number:
                seconds[name].append(elapsed)
    return seconds
