"""Physical cores for workers: which this process may use, their NUMA nodes and caches, and pinning threads to them.

Two hardware threads of one core share its units and its path to memory. A second worker there gains nothing on work
that is bound by memory, so only one logical core of each physical one counts.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from zenflow_compile.checks.validate import usable_cores
from zenflow_compile.performance.hardware import LEFT_FREE

SYSTEM = Path("/sys/devices/system")
"""Where Linux describes its processors and NUMA nodes."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core.

    Attributes:
        logical: the first of its logical cores that this process may use, to which workers are pinned.
        node: its NUMA node; 0 where the system does not tell.
    """

    logical: int
    node: int = 0


def physical_cores(system: Path = SYSTEM, usable: Sequence[int] | None = None) -> tuple[Core, ...]:
    """The physical cores of the logical cores ``usable``, None for this process's affinity mask; never empty.

    Args:
        system: the directory of ``cpu/cpuN/topology`` and ``cpu/cpuN/nodeM``. Without these files, the first logical
            cores are assumed to be the physical ones, as Linux numbers them, up to psutil's count.
    """
    if usable is None:
        usable = usable_cores()
    siblings = {logical: _siblings(system / f"cpu/cpu{logical}/topology") for logical in usable}
    if None in siblings.values():
        physical = psutil.cpu_count(logical=False) or len(usable)
        return tuple(Core(logical, _node(system / f"cpu/cpu{logical}")) for logical in usable[:physical])
    first_of: dict[str | None, int] = {}
    for logical in usable:
        first_of.setdefault(siblings[logical], logical)
    return tuple(Core(logical, _node(system / f"cpu/cpu{logical}")) for logical in first_of.values())


def worker_count(cores: int, quota: float | None, workers: int | None = None) -> int:
    """The number of workers to run on ``cores`` physical cores.

    Args:
        quota: of the container, ``cpu_quota()``.
        workers: at most one per core. None leaves two cores to PyTorch and one to each live worker process of a
            DataLoader; cores beyond the container's quota do not count then.

    Raises:
        ValueError: more workers than cores.
    """
    if workers is not None:
        if workers > cores:
            raise ValueError(
                f"workers={workers} must be in [1, {cores}]: this process may use {cores} physical "
                f"core{'s' if cores > 1 else ''}, and two workers on one gain nothing; lower it, or leave it at None"
            )
        return workers
    cores = min(cores, math.floor(quota or cores))
    # Worker processes of DataLoaders are daemonic, unlike idle processes of compilers.
    data_loader_workers = sum(child.daemon for child in multiprocessing.active_children())
    return max(1, cores - LEFT_FREE - data_loader_workers)


def choose_cores(cores: Sequence[Core], count: int, in_use: Mapping[int, int]) -> tuple[int, ...]:
    """Choose logical cores for ``count`` workers: those with the fewest workers, spread over all NUMA nodes.

    The last cores come first, since the scheduler and users who pin by hand tend to begin with the first ones.
    ``in_use``: number of other engines' workers of this process, by logical core.
    """
    seen: dict[int, int] = {}
    rank: dict[int, tuple[int, int, int]] = {}
    for core in sorted(cores, key=lambda core: core.logical, reverse=True):
        place = seen[core.node] = seen.get(core.node, 0) + 1
        rank[core.logical] = (in_use.get(core.logical, 0), place, core.node)
    return tuple(sorted(rank, key=rank.__getitem__)[:count])


def run_pinned(cores: Sequence[int], work: Callable[[int], object]) -> None:
    """Run ``work(i)`` in a new thread on ``cores[i]``, for all i at once, and wait for all of them.

    Raises:
        BaseException: the first error of a call.
        RuntimeError: the system starts no further thread.
    """
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            # For speed alone: another system has no call, and a sandbox may forbid it, or have taken the core away.
            with suppress(AttributeError, OSError):
                os.sched_setaffinity(threading.get_native_id(), {cores[index]})
            work(index)
        except BaseException as error:
            errors.append(error)

    threads: list[threading.Thread] = []
    try:
        for index in range(len(cores)):
            thread = threading.Thread(target=run, args=(index,), name=f"zenflow-pinned-{index}", daemon=True)
            thread.start()
            threads.append(thread)
    finally:
        # Also after an error: from here on the caller may write what these threads would touch.
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def may_pin() -> bool:
    """Whether the system lets threads choose their cores; asked by choosing what the calling thread has."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except (AttributeError, OSError):  # another system, or a sandbox
        return False
    return True


def last_level_cache_bytes(system: Path = SYSTEM) -> int:
    """The largest cache of the first core that this process may use; 32 MiB where the system does not tell."""
    sizes = []
    for path in (system / f"cpu/cpu{physical_cores(system)[0].logical}/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)  # the kernel writes "2048K"
    return max(sizes, default=32 << 20)


def nodes_of(cores: Iterable[int], system: Path = SYSTEM) -> set[int]:
    return {_node(system / f"cpu/cpu{core}") for core in cores}


def node_of_device(pci_address: str, devices: Path = PCI_DEVICES) -> int | None:
    """The NUMA node near a device such as "0000:c1:00.0"; None where the system does not tell."""
    with suppress(OSError, ValueError):
        node = int((devices / pci_address.lower() / "numa_node").read_text())
        return node if node >= 0 else None  # -1: the firmware does not say
    return None


def _siblings(topology: Path) -> str | None:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
        with suppress(OSError):
            return (topology / name).read_text().strip()
    return None


def _node(cpu: Path) -> int:
    numbers = [path.name.removeprefix("node") for path in cpu.glob("node*")]
    return next((int(number) for number in numbers if number.isdigit()), 0)


class LocalRanks(NamedTuple):
    """``rank``: of this process among ``size`` processes on this machine, from 0."""

    rank: int
    size: int

    def part(self, items: Sequence[_T]) -> Sequence[_T]:
        """This process's part of consecutive ``items``; one of them at least, shared if there are too few."""
        first = len(items) * self.rank // self.size
        stop = len(items) * (self.rank + 1) // self.size
        return items[first : max(stop, first + 1)]

    def cores(self, cores: Sequence[Core], nodes: Sequence[int] | None = None) -> Sequence[Core]:
        """This process's part of the physical cores of a machine, of as few NUMA nodes as possible.

        Args:
            nodes: of the ranks' devices. Ranks have parts in this order: every rank has as many cores, so that not
                each is near its device where most devices are near one node. None if it is not known: consecutive ranks
                share a node, since launchers give them consecutive devices, which mostly share one, too.
        """
        place = self
        if nodes is not None:
            place = self._replace(rank=sorted(range(self.size), key=lambda rank: (nodes[rank], rank)).index(self.rank))
        return place.part(sorted(cores, key=lambda core: (core.node, core.logical)))

    def directory(self, path: str | os.PathLike[str]) -> Path:
        """The directory of this process below ``path``, which all of them were given."""
        return Path(path) if self.size == 1 else Path(path) / f"rank{self.rank}"


_ALONE = LocalRanks(0, 1)
_met: list[LocalRanks] = []


def note_local_ranks(ranks: LocalRanks) -> None:
    """Note which ranks this process has met on its machine, for programs whose launcher does not say it."""
    _met.append(ranks)


def local_ranks() -> LocalRanks:
    """This process among those of its machine: as torchrun says it, else srun or the ranks that it has met.

    Of the last two the greater number is right: srun does not count processes that a program starts, and ranks of
    another model are not met.
    """
    return _of_torchrun() or max(_of_slurm() or _ALONE, *_met, _ALONE, key=attrgetter("size"))


def bound_by_launcher() -> bool:
    """Whether this process has CPUs of its own, as ``srun --cpus-per-task`` and ``mpirun`` give: none are to divide."""
    return _of_torchrun() is None and len(usable_cores()) < (os.cpu_count() or 1)


def _of_torchrun() -> LocalRanks | None:
    with suppress(KeyError, ValueError):
        rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return LocalRanks(rank, size) if 0 <= rank < size else None
    return None


_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of SLURM: "4(x2),3" are three machines


def _of_slurm() -> LocalRanks | None:
    with suppress(KeyError, ValueError, IndexError):
        rank, node = int(os.environ["SLURM_LOCALID"]), int(os.environ["SLURM_NODEID"])
        found = _TASKS.findall(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        size = [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))][node]
        return LocalRanks(rank, size) if 0 <= rank < size else None
    return None
