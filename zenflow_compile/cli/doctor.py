"""``zenflow-compile doctor``: measures this machine."""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zenflow_compile.measure import bandwidth
from zenflow_compile.measure.disk import DiskRates, disk_rates
from zenflow_compile.native.build import BuildError
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.devices import device_of, device_types, implementation_of
from zenflow_compile.runtime.device.stream_flags import make_flags
from zenflow_compile.runtime.host.arena import available_host_memory
from zenflow_compile.runtime.host.cgroups import cpu_quota
from zenflow_compile.runtime.host.cores import LocalRanks, last_level_cache_bytes, may_pin, physical_cores, worker_count
from zenflow_compile.runtime.host.host_kernel import check_native_code
from zenflow_compile.runtime.parameters.capacity import free_device_bytes, nodes_of_ranks
from zenflow_compile.torch_internals import torch_private

_QUICK_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one of several ranks on this machine has of it: physical cores, worker threads, and host memory."""

    cores: list[int]
    workers: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFindings:
    """The parts of a machine.

    Attributes:
        nodes: physical cores that this process may use, one logical core each, by NUMA node.
        workers: worker threads of an optimizer with default options.
        cache_bytes: of the last level.
        memory_bytes: memory that this process can still use; ``memory_limit`` names the limit.
        lockable_bytes: RLIMIT_MEMLOCK; None without a limit.
        compiler: C++ compiler of host updates; None if there is none.
        abilities: what the device's driver and the system allow, with what is lost where they do not.
        versions: of the software that the measurements depend on.
        ranks: what each of so many processes has, as a launcher would start them here.
    """

    nodes: dict[int, list[int]]
    workers: int
    cache_bytes: int
    memory_bytes: int
    memory_limit: str
    lockable_bytes: int | None
    compiler: str | None
    device: str
    abilities: dict[str, str]
    versions: dict[str, str]
    ranks: list[RankShare]


@dataclass(frozen=True, slots=True)
class Findings:
    """The measurements; all rates per second.

    Attributes:
        device: AdamW on a tenth of a matrix's columns; resident: on all of a parameter.
        matmul_flops: FLOP/s of a large product of bf16 matrices on the device.
        disk: None without a directory to measure.
    """

    machine: MachineFindings
    host: list[bandwidth.HostRates]
    link: list[bandwidth.LinkRates]
    device: bandwidth.DeviceRate
    resident: bandwidth.DeviceRate
    matmul_flops: float
    disk: DiskRates | None


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure and print; ``parser`` reports errors, with exit code 2."""
    cores = len(physical_cores())
    threads = options.threads or _thread_counts(cores)
    for count in threads:
        if not 1 <= count <= cores:
            parser.error(f"--threads {count} must be in [1, {cores}]: this process may use {cores} physical core(s)")
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks} must be at least 1")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    available = available_host_memory()[0] // 2**20
    if options.megabytes is not None and not 1 <= options.megabytes <= available:
        parser.error(f"--megabytes {options.megabytes} must be in [1, {available}], the available memory")
    try:
        device = _device(options.device)
        check_native_code()
        disk = None if options.nvme_path is None else disk_rates(options.nvme_path)
    except (ValueError, BuildError) as error:
        parser.error(str(error))
    total_bytes = bandwidth.default_bytes() if options.megabytes is None else options.megabytes << 20
    console = Console(stderr=options.json)  # standard output is for JSON alone
    with console.status("Measuring"):
        findings = measure(device, threads, total_bytes, options.rounds, disk, ranks=options.ranks)
    if options.json:
        json.dump(asdict(findings), sys.stdout, indent=2)
        print()
    else:
        for table in tables(findings):
            console.print(table)
    return 0


def measure(
    device: torch.device,
    threads: Sequence[int],
    total_bytes: int,
    rounds: int,
    disk: DiskRates | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
) -> Findings:
    """Measure this machine, which ``ranks`` processes divide, with each number of threads; medians of ``rounds``."""
    return Findings(
        machine=machine(device, ranks),
        host=[bandwidth.host_rates(count, total_bytes, rounds) for count in threads],
        link=bandwidth.link_rates(device, min(bandwidth.default_link_bytes(), total_bytes), rounds),
        device=bandwidth.device_rate(device, rounds),
        resident=bandwidth.resident_rate(device, dtype, free_device_bytes(device)),
        matmul_flops=bandwidth.matmul_flops(device, torch.bfloat16),
        disk=disk,
    )


def quick_findings(nvme_path: str | None) -> dict[str, Any]:
    """The output of ``doctor --json`` for one worker and for all, in fewer rounds.

    Raises:
        ValueError: ``nvme_path`` cannot be used, or there is no C++ compiler.
    """
    try:
        check_native_code()
    except BuildError as error:
        raise ValueError(str(error)) from None
    disk = None if nvme_path is None else disk_rates(nvme_path)
    cores = len(physical_cores())
    found = measure(_device(None), sorted({1, cores}), bandwidth.default_bytes(), _QUICK_ROUNDS, disk)
    return asdict(found)


def machine(device: torch.device, ranks: int = 1) -> MachineFindings:
    """The machine, as this process sees it, and as ``ranks`` processes divide it."""
    nodes: dict[int, list[int]] = {}
    cores = physical_cores()
    for core in cores:
        nodes.setdefault(core.node, []).append(core.logical)
    memory_bytes, memory_limit = available_host_memory()
    workers = partial(worker_count, quota=cpu_quota())
    here = device_of(device)
    near = nodes_of_ranks(LocalRanks(here.torch_device.index or 0, ranks), here)
    parts = [LocalRanks(rank, ranks).cores(cores, near) for rank in range(ranks)]
    return MachineFindings(
        nodes=nodes,
        workers=workers(len(cores)),
        cache_bytes=last_level_cache_bytes(),
        memory_bytes=memory_bytes,
        memory_limit=memory_limit,
        lockable_bytes=_lockable_bytes(),
        compiler=None if (compiler := torch_private.cpp_compiler()) is None else shlex.join(compiler),
        device=here.name,
        abilities=_abilities(here),
        versions={
            "zenflow-compile": _version("zenflow-compile"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: each for kind in device_types() for name, each in implementation_of(kind).versions().items()},
            "triton": _version("triton"),
        },
        ranks=[RankShare([core.logical for core in part], workers(len(part)), memory_bytes // ranks) for part in parts],
    )


def tables(findings: Findings) -> list[Table]:
    """The findings for a terminal."""
    has = findings.machine
    about = Table(title="This machine", show_header=False, box=None, title_justify="left")
    for name, value in (
        ("physical cores", "; ".join(f"NUMA node {node}: {_ranges(cores)}" for node, cores in has.nodes.items())),
        ("workers", f"{has.workers} by default"),
        *((f"rank {rank}", _shown(each)) for rank, each in enumerate(has.ranks) if len(has.ranks) > 1),
        ("last-level cache", _gib(has.cache_bytes)),
        ("usable memory", f"{_gib(has.memory_bytes)} ({has.memory_limit})"),
        ("lockable memory", "no limit" if has.lockable_bytes is None else f"{_gib(has.lockable_bytes)} (ulimit -l)"),
        ("C++ compiler", has.compiler or "none"),
        ("device", has.device),
        *has.abilities.items(),
        ("versions", ", ".join(f"{name} {number}" for name, number in has.versions.items())),
    ):
        about.add_row(name, value)
    memory = _table(
        "Host memory, GB/s",
        "bytes read and written; no write-allocate",
        ("threads", "copy_", "add_ in place", "Adam, 4 x bf16", "of copy_", "M parameters/s"),
    )
    for rate in findings.host:
        memory.add_row(
            str(rate.threads),
            *(_gb(value) for value in (rate.copy, rate.add, rate.adam)),
            f"{rate.adam_to_copy:.2f}",
            f"{rate.parameters / 1e6:.0f}",
        )
    on_cpu = any(rates.memory == "memmove" for rates in findings.link)
    note = "the device is the CPU, so its copy lanes are threads" if on_cpu else ""
    link = _table("Between device and host, GB/s", note, ("D2H", "H2D"), name="host memory")
    for rates in findings.link:
        link.add_row(rates.memory, _gb(rates.to_host), _gb(rates.to_device))
    product = f"a product of bf16 matrices reaches {findings.matmul_flops / 1e12:.3g} TFLOP/s"
    device = _table("AdamW on the device, bf16", product, ("M parameters/s", "GB/s"), name="of")
    for name, reached in (
        ("resident parameters", findings.resident),
        ("a tenth of a matrix's columns", findings.device),
    ):
        device.add_row(name, f"{reached.parameters / 1e6:.0f}", _gb(reached.bytes))
    found = [about, memory, link, device]
    if findings.disk is not None:
        note = "four threads, in one direction at a time, with checksums"
        disk = _table("Disk, GB/s", note, ("read", "written", "GB free"))
        disk.add_row(*(_gb(value) for value in (findings.disk.read, findings.disk.write, findings.disk.free_bytes)))
        found.append(disk)
    return found


def _table(title: str, note: str, numbers: Sequence[str], *, name: str | None = None) -> Table:
    """A table without rows: ``note`` under its title, and columns of numbers, after one of names if it has one."""
    table = Table(title=f"{title}\n{note}" if note else title, title_justify="left", min_width=56)
    if name is not None:
        table.add_column(name)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _device(name: str | None) -> torch.device:
    """The device of this name; None: an accelerator if there is one.

    Raises:
        ValueError: this machine has no such device.
    """
    counts = {kind: implementation_of(kind).count() for kind in device_types()}
    if name is None:
        return torch.device(next((kind for kind, count in counts.items() if count and kind != "cpu"), "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if (device.index or 0) < counts.get(device.type, 0):
        return device
    valid = ", ".join(
        "cpu" if kind == "cpu" else f"{kind}:{index}" for kind, count in counts.items() for index in range(count)
    )
    raise ValueError(f"--device {name} must be one of {valid}")


def _thread_counts(cores: int) -> list[int]:
    powers = [1 << exponent for exponent in range(cores.bit_length())]
    return sorted({cores, *(count for count in powers if count <= cores)})


def _lockable_bytes() -> int | None:
    try:
        import resource  # not on every platform
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _abilities(device: Device) -> dict[str, str]:
    found = {"threads on cores": "yes" if may_pin() else "no: host updates are slower where threads move between cores"}
    if device.streams is None:
        return found
    values = make_flags(1, device) is not None
    found["stream values"] = "yes" if values else "no: each forward waits on the host for late updates"
    if device.refusal is None:
        found["pinned memory"] = "yes"
        return found
    try:
        device.pinned_buffer(mmap.PAGESIZE)
        found["pinned memory"] = f"only the driver's own ({device.refusal})"
    except RuntimeError as error:
        found["pinned memory"] = f"no: copies are slower, and the training thread waits for them ({error})"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _shown(share: RankShare) -> str:
    workers = f"{share.workers} worker" + ("s" if share.workers > 1 else "")
    return f"cores {_ranges(share.cores)}; {workers}; {_gib(share.memory_bytes)} of host memory"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
