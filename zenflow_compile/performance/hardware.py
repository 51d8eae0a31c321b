"""The numbers of a machine that plans and predictions read, and named machines, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenflow_compile.checks.validate import check_integer, nearest

LEFT_FREE = 2
"""Cores per device left to PyTorch by default: one for the training thread, one for autograd's."""


HOST_PASS_BYTES = 28
"""Host memory per parameter that ``Hardware.adam_per_core`` counts: fp32 master and moments read and written, one bf16
gradient read, bf16 weights written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Rates in bytes per second.

    Attributes:
        host: of host memory, bytes read and bytes written, with as many threads as there are workers.
        to_host, to_device: of the link between device and host.
        disk: of the disk, with equal bytes read and written; None where it is not known.
    """

    host: float
    to_host: float
    to_device: float
    disk: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A node. Rates are per second; each device has its own link, and all devices share the host.

    Attributes:
        nodes: equal ones, each of which has a copy of the optimizer state; see ``across``.
        devices: of the node, each training on its own tokens and owning an equal share of the copy.
        device_flops: dense FLOP/s of one device in the training dtype, at its peak.
        utilization: share of this peak that forward and backward reach.
        device_bytes: memory of one device; device_bandwidth: bytes/s of it, reads and writes together.
        link_to_host, link_to_device: bytes/s of one device's pinned copies.
        peer_bandwidth: bytes/s that one device sends to other devices in collectives; None for a single device.
        network_bandwidth: bytes/s that one device sends to devices of other nodes; None where it is not known.
        host_bytes: memory of the node; host_bandwidth: bytes/s of it, reads and writes together, all cores.
        cores: physical cores of the node.
        device_cores: cores that are the device, if the host's processor is the device; its copies take cores, too.
            None: the device is another one.
        adam_per_core: parameters/s that one core updates alone: a fused pass over fp32 state and bf16 gradient.
        disk_read, disk_write: bytes/s of the local disk; disk_bytes: of its free space. None without a disk.
        sources: where each number comes from, by attribute.
    """

    name: str
    nodes: int = 1
    devices: int = 1
    device_flops: float
    utilization: float
    device_bytes: float
    device_bandwidth: float
    link_to_host: float
    link_to_device: float
    peer_bandwidth: float | None = None
    network_bandwidth: float | None = None
    host_bytes: float
    host_bandwidth: float
    cores: int
    adam_per_core: float
    device_cores: int | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_bytes: float | None = None
    sources: Mapping[str, str]

    @property
    def workers(self) -> int:
        """Threads per device that update on the host by default: its share of the cores less two."""
        return max(1, self.cores // self.devices - LEFT_FREE)

    def bandwidths(self, workers: int | None = None) -> Bandwidths:
        """The rates of all devices together, with so many workers for each; None takes the default."""
        threads = self.devices * (self.workers if workers is None else workers)
        disk = (self.disk_read, self.disk_write)
        return Bandwidths(
            host=min(self.host_bandwidth, threads * self.adam_per_core * HOST_PASS_BYTES),
            to_host=self.devices * self.link_to_host,
            to_device=self.devices * self.link_to_device,
            disk=None if None in disk else 2 / sum(1 / rate for rate in disk if rate),
        )

    @property
    def all_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    def across(self, nodes: int) -> Hardware:
        """The same as ``nodes`` equal nodes.

        Raises:
            ValueError: ``nodes`` is below 1, or the hardware lacks ``network_bandwidth``.
            TypeError: ``nodes`` is not an integer.
        """
        nodes = check_integer("nodes", nodes, 1, remedy="; 1 predicts a single node")
        if nodes == 1:
            return self
        if self.network_bandwidth is None:
            raise ValueError(
                f"network_bandwidth=None of hardware {self.name!r} must be bytes per second: nodes={nodes} exchange "
                "gradients; give it, or use nodes=1"
            )
        return replace(self, nodes=nodes)

    def check_rates(self, *, in_files: bool) -> None:
        """Refuse to predict with missing rates; ``in_files``: whether the disk is needed.

        Raises:
            ValueError: a rate of collectives or of the disk is None although the prediction needs it.
        """
        if self.devices > 1 and self.peer_bandwidth is None:
            raise ValueError(
                f"peer_bandwidth=None of hardware {self.name!r} must be bytes per second: devices={self.devices} "
                "exchange gradients; give it, or use devices=1"
            )
        if in_files and (self.disk_read is None or self.disk_write is None):
            rates = f"disk_read={self.disk_read} and disk_write={self.disk_write}"
            raise ValueError(
                f"{rates} of hardware {self.name!r} must be bytes per second: the plan keeps state in files; give "
                "both, or choose a policy that keeps it in memory"
            )


_MEGATRON_A100 = "assumption: 0.44 to 0.52 of an A100's peak, Narayanan et al., SC '21 (arXiv 2104.04473), Table 1"
_LLAMA3_H100 = "assumption: 0.38 to 0.43 of an H100's peak, Llama 3 (arXiv 2407.21783), Table 4; without offloading"
_STREAM = 0.8
_DDR = "times 0.8: the share of a channel's peak that streaming reaches is an assumption; ``doctor`` measures yours"
_ADAM = (
    0.57e9,
    "assumption: less than half of what one AVX-512 core does alone (benchmarks/results/host_adam.json: bf16, "
    "1 gradient); with all cores the host's memory limits first",
)
_PINNED_PCIE4 = (
    25e9,
    "PCIe 4.0 x16 carries 31.5e9 each way (PCI-SIG), pinned copies about 0.8 of that (assumption)",
)
_PINNED_PCIE5 = "Deep Optimizer States (Middleware '24): B = 55 GB/s per GPU for its 4x H100; PCIe 5.0 x16 carries 63e9"
_DESKTOP_PCIE5 = (
    50e9,
    "PCIe 5.0 x16 carries 63e9 each way (PCI-SIG), pinned copies about 0.8 of that (assumption)",
)
_NDR = "NVIDIA DGX H100 datasheet: a 400 Gb/s ConnectX-7 for each of 8 GPUs"
_HALF_DUPLEX = "NVLink datasheet figure counts both directions; half of it"

_SSD = {
    "disk_read": (6.8e9, "assumption: one PCIe 4.0 data centre SSD"),
    "disk_write": (4.0e9, "assumption: the same"),
}
_EIGHT_SSDS = {
    "disk_read": (8 * 6.8e9, "assumption: eight PCIe 4.0 data centre SSDs in RAID 0"),
    "disk_write": (8 * 4.0e9, "assumption: the same"),
}
_SAMSUNG_990_PRO = {
    "disk_read": (7.45e9, "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s"),
    "disk_write": (6.9e9, "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s"),
    "disk_bytes": (2e12, "Samsung 990 Pro, 2 TB"),
}
_H100 = {
    "device_flops": (989e12, "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bf16, dense"),
    "utilization": (0.4, _LLAMA3_H100),
    "device_bytes": (80e9, "NVIDIA H100 datasheet, 80 GB"),
    "device_bandwidth": (3350e9, "NVIDIA H100 datasheet, SXM: 3.35 TB/s"),
    "link_to_host": (55e9, _PINNED_PCIE5),
    "link_to_device": (55e9, _PINNED_PCIE5),
    "peer_bandwidth": (450e9, f"NVIDIA H100 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}"),
}
_H200 = {
    "device_flops": (989e12, "NVIDIA H200 datasheet, SXM: 989 TFLOP/s bf16, dense (half of the sparse figure)"),
    "utilization": (0.4, _LLAMA3_H100),
    "device_bytes": (141e9, "NVIDIA H200 datasheet, 141 GB"),
    "device_bandwidth": (4800e9, "NVIDIA H200 datasheet: 4.8 TB/s"),
    "link_to_host": (55e9, f"as an H100: {_PINNED_PCIE5}"),
    "link_to_device": (55e9, f"as an H100: {_PINNED_PCIE5}"),
}


def _machine(name: str, devices: int = 1, /, **numbers: tuple[float, str]) -> Hardware:
    """``numbers``: each with its source."""
    values: dict[str, Any] = {attribute: number for attribute, (number, _) in numbers.items()}
    sources = {attribute: source for attribute, (_, source) in numbers.items()}
    return Hardware(name=name, devices=devices, **values, sources=sources)


_NAMED = (
    _machine(
        "4xa100-40g-pcie4",
        4,
        device_flops=(312e12, "NVIDIA A100 datasheet: 312 TFLOP/s bf16, dense"),
        utilization=(0.45, _MEGATRON_A100),
        device_bytes=(40e9, "NVIDIA A100 datasheet, 40 GB"),
        device_bandwidth=(1555e9, "NVIDIA A100 datasheet: 1555 GB/s (40 GB)"),
        link_to_host=_PINNED_PCIE4,
        link_to_device=_PINNED_PCIE4,
        peer_bandwidth=(300e9, f"NVIDIA A100 datasheet: NVLink 600 GB/s; {_HALF_DUPLEX}"),
        host_bytes=(512 * 2**30, "a node of Polaris (Argonne, machine overview): EPYC 7543P, 512 GiB"),
        host_bandwidth=(_STREAM * 8 * 25.6e9, f"same: 8 channels DDR4-3200, 8 x 25.6e9; {_DDR}"),
        cores=(32, "same: 32"),
        adam_per_core=_ADAM,
        disk_read=(6.4e9, "assumption: two PCIe 4.0 SSDs in RAID 0, of the class of 3.2e9 each"),
        disk_write=(4.0e9, "assumption: the same, 2.0e9 each"),
        disk_bytes=(3.2e12, "Polaris: two SSDs of 1.6 TB in RAID 0"),
    ),
    _machine(
        "4xh100-80g",
        4,
        **_H100,
        network_bandwidth=(50e9, f"assumption, as in a larger node: {_NDR}"),
        host_bytes=(512 * 2**30, "assumption: 16 DIMMs of 32 GiB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"2x Xeon Platinum 8468, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(96, "Intel ARK, Xeon Platinum 8468: 48 each"),
        adam_per_core=_ADAM,
        **_SSD,
        disk_bytes=(3.8e12, "assumption: the same, 3.84 TB"),
    ),
    _machine(
        "8xh100-80g",
        8,
        **_H100,
        network_bandwidth=(50e9, _NDR),
        host_bytes=(2e12, "NVIDIA DGX H100 datasheet: 2 TB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"the same: 2x Xeon Platinum 8480C, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(112, "the same: 112"),
        adam_per_core=_ADAM,
        **_EIGHT_SSDS,
        disk_bytes=(8 * 3.84e12, "NVIDIA DGX H100 datasheet: 8 SSDs of 3.84 TB"),
    ),
    _machine(
        "4xv100-32g",
        4,
        device_flops=(125e12, "NVIDIA V100 datasheet, SXM2: 125 TFLOP/s fp16"),
        utilization=(0.3, "assumption: 39 of 125 TFLOP/s, Megatron-LM (arXiv 1909.08053), section 5.1"),
        device_bytes=(32e9, "NVIDIA V100 datasheet, 32 GB"),
        device_bandwidth=(900e9, "NVIDIA V100 datasheet: 900 GB/s"),
        link_to_host=(12e9, "Deep Optimizer States: B = 3e9 fp32 parameters/s, which is 12 GB/s, on its V100 testbed"),
        link_to_device=(12e9, "the same"),
        peer_bandwidth=(150e9, f"NVIDIA V100 datasheet: NVLink 300 GB/s; {_HALF_DUPLEX}"),
        host_bytes=(192 * 2**30, "assumption: 12 DIMMs of 16 GiB"),
        host_bandwidth=(
            _STREAM * 12 * 23.5e9,
            f"assumption: 2x Xeon Gold 6230, 6 channels DDR4-2933 each, 12 x 23.5e9; {_DDR}",
        ),
        cores=(40, "assumption: the same, 20 each (Intel ARK)"),
        adam_per_core=_ADAM,
    ),
    _machine(
        "gh200",
        device_flops=(989e12, "NVIDIA GH200 datasheet: 989 TFLOP/s bf16, dense (half of the sparse figure)"),
        utilization=(0.4, _LLAMA3_H100),
        device_bytes=(96e9, "NVIDIA GH200 datasheet, 96 GB HBM3"),
        device_bandwidth=(4000e9, "NVIDIA GH200 datasheet: 4 TB/s"),
        link_to_host=(
            297e9,
            "measured over NVLink-C2C by Schieffer et al. (ICPP '24, arXiv 2407.07850); 450e9 nominal",
        ),
        link_to_device=(375e9, "the same"),
        host_bytes=(480e9, "NVIDIA GH200 datasheet, 480 GB LPDDR5X"),
        host_bandwidth=(486e9, "STREAM, Schieffer et al. (the same); 512e9 nominal"),
        cores=(72, "NVIDIA GH200 datasheet: 72 Neoverse V2"),
        adam_per_core=(
            0.57e9,
            "assumption: the value of the other hosts; not measured on Arm",
        ),
    ),
    _machine(
        "h200",
        **_H200,
        host_bytes=(256 * 2**30, "one of the eight devices of a DGX H200 (2x Xeon Platinum 8480C, 2 TB): an eighth"),
        host_bandwidth=(_STREAM * 2 * 38.4e9, f"the same: 16 channels DDR5-4800, an eighth is 2 x 38.4e9; {_DDR}"),
        cores=(14, "the same: 112, an eighth"),
        adam_per_core=_ADAM,
        **_SSD,
        disk_bytes=(3.8e12, "DGX H200 datasheet: 8 SSDs of 3.84 TB, an eighth"),
    ),
    _machine(
        "rtx-4090",
        device_flops=(165.2e12, "NVIDIA Ada whitepaper: 165.2 TFLOP/s fp16 with fp32 accumulation, dense"),
        utilization=(0.45, "assumption: as an A100; nothing published was found"),
        device_bytes=(24e9, "NVIDIA RTX 4090: 24 GB"),
        device_bandwidth=(1008e9, "NVIDIA Ada whitepaper: 1008 GB/s"),
        link_to_host=_PINNED_PCIE4,
        link_to_device=_PINNED_PCIE4,
        host_bytes=(64 * 2**30, "assumption: a desktop with two DIMMs of 32 GiB"),
        host_bandwidth=(_STREAM * 2 * 41.6e9, f"assumption: the same, 2 channels DDR5-5200, 2 x 41.6e9; {_DDR}"),
        cores=(16, "assumption: Ryzen 9 7950X (AMD): 16"),
        adam_per_core=_ADAM,
        **_SAMSUNG_990_PRO,
    ),
    _machine(
        "rtx-3090",
        device_flops=(
            71e12,
            "NVIDIA GA102 whitepaper, Appendix A: 71 TFLOP/s bf16 with fp32 accumulation, dense: 82 SMs at 1.695 GHz "
            "and 512 FLOPs per clock, half the rate of the RTX A6000 in the same whitepaper (154.8, 84 SMs at 1.8 GHz)",
        ),
        utilization=(0.45, "assumption: as an A100; nothing published was found"),
        device_bytes=(24e9, "NVIDIA GA102 whitepaper, Appendix A: 24 GB"),
        device_bandwidth=(936e9, "NVIDIA GA102 whitepaper, Appendix A: 936 GB/s, which is 384 bits at 19.5 Gb/s"),
        link_to_host=_PINNED_PCIE4,
        link_to_device=_PINNED_PCIE4,
        host_bytes=(64 * 2**30, "assumption: a desktop with two DIMMs of 32 GiB"),
        host_bandwidth=(_STREAM * 2 * 25.6e9, f"assumption: the same, 2 channels DDR4-3200, 2 x 25.6e9; {_DDR}"),
        cores=(16, "assumption: Ryzen 9 5950X (AMD): 16"),
        adam_per_core=(
            0.57e9,
            "assumption: the value of the other hosts; not measured with AVX2, and 16 cores exceed this host's memory",
        ),
        **_SAMSUNG_990_PRO,
    ),
    _machine(
        "rtx-5090",
        device_flops=(
            209.5e12,
            "NVIDIA RTX Blackwell whitepaper: 209.5 TFLOP/s bf16 with fp32 accumulation, dense (419 sparse)",
        ),
        utilization=(0.45, "assumption: as an A100; nothing published was found"),
        device_bytes=(32e9, "NVIDIA RTX Blackwell whitepaper: 32 GB"),
        device_bandwidth=(1792e9, "NVIDIA RTX Blackwell whitepaper: 1792 GB/s"),
        link_to_host=_DESKTOP_PCIE5,
        link_to_device=_DESKTOP_PCIE5,
        host_bytes=(96 * 2**30, "assumption: a desktop with two DIMMs of 48 GiB"),
        host_bandwidth=(_STREAM * 2 * 44.8e9, f"Ryzen 9 9950X (AMD): 2 channels DDR5-5600, 2 x 44.8e9; {_DDR}"),
        cores=(16, "assumption: Ryzen 9 9950X (AMD): 16"),
        adam_per_core=_ADAM,
        **_SAMSUNG_990_PRO,
    ),
    _machine(
        "rtx-pro-6000",
        device_flops=(
            500e12,
            "NVIDIA RTX PRO 6000 Blackwell datasheet: 4000 TOPS in sparse fp4; dense bf16 is an eighth of it. Fp32 "
            "accumulation has the full rate, unlike that of GeForce cards",
        ),
        utilization=(0.45, "assumption: as an A100; nothing published was found"),
        device_bytes=(96e9, "NVIDIA RTX PRO 6000 Blackwell datasheet: 96 GB"),
        device_bandwidth=(1792e9, "NVIDIA RTX PRO 6000 Blackwell datasheet: 1792 GB/s"),
        link_to_host=_DESKTOP_PCIE5,
        link_to_device=_DESKTOP_PCIE5,
        host_bytes=(256 * 2**30, "assumption: a workstation with eight DIMMs of 32 GiB"),
        host_bandwidth=(
            _STREAM * 8 * 41.6e9,
            f"assumption: Threadripper PRO 7975WX (AMD): 8 channels DDR5-5200, 8 x 41.6e9; {_DDR}",
        ),
        cores=(32, "assumption: Threadripper PRO 7975WX (AMD): 32"),
        adam_per_core=_ADAM,
        **_SAMSUNG_990_PRO,
    ),
    _machine(
        "l40s",
        device_flops=(362.05e12, "NVIDIA L40S datasheet: 362.05 TFLOP/s bf16, dense (733 sparse)"),
        utilization=(0.45, "assumption: as an A100; nothing published was found"),
        device_bytes=(48e9, "NVIDIA L40S datasheet: 48 GB"),
        device_bandwidth=(864e9, "NVIDIA L40S datasheet: 864 GB/s"),
        link_to_host=_PINNED_PCIE4,
        link_to_device=_PINNED_PCIE4,
        host_bytes=(192 * 2**30, "assumption: a quarter of a server with 24 DIMMs of 32 GiB"),
        host_bandwidth=(
            _STREAM * 6 * 38.4e9,
            f"assumption: a quarter of 2x EPYC 9354 (AMD), 12 channels DDR5-4800 each: 6 x 38.4e9; {_DDR}",
        ),
        cores=(16, "assumption: the same, 64, a quarter"),
        adam_per_core=_ADAM,
        **_SSD,
        disk_bytes=(3.8e12, "assumption: the same, 3.84 TB"),
    ),
    _machine(
        "a100-80g",
        device_flops=(312e12, "NVIDIA A100 datasheet: 312 TFLOP/s bf16, dense"),
        utilization=(0.45, _MEGATRON_A100),
        device_bytes=(80e9, "NVIDIA A100 datasheet, 80 GB"),
        device_bandwidth=(2039e9, "NVIDIA A100 datasheet, SXM, 80 GB: 2039 GB/s"),
        link_to_host=_PINNED_PCIE4,
        link_to_device=_PINNED_PCIE4,
        host_bytes=(250e9, "one of the eight devices of a DGX A100 640 GB (2x EPYC 7742, 2 TB): an eighth"),
        host_bandwidth=(_STREAM * 2 * 25.6e9, f"the same: 16 channels DDR4-3200, an eighth is 2 x 25.6e9; {_DDR}"),
        cores=(16, "the same: 128, an eighth"),
        adam_per_core=_ADAM,
        **_SSD,
        disk_bytes=(3.8e12, "DGX A100 datasheet: 8 SSDs of 3.84 TB, an eighth"),
    ),
    _machine(
        "8xh200-141g",
        8,
        **_H200,
        peer_bandwidth=(450e9, f"NVIDIA H200 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}"),
        network_bandwidth=(50e9, f"as a DGX H100: {_NDR}"),
        host_bytes=(2e12, "NVIDIA DGX H200 datasheet: 2 TB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"the same: 2x Xeon Platinum 8480C, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(112, "the same: 112"),
        adam_per_core=_ADAM,
        **_EIGHT_SSDS,
        disk_bytes=(8 * 3.84e12, "NVIDIA DGX H200 datasheet: 8 SSDs of 3.84 TB"),
    ),
    _machine(
        "8xb200-180g",
        8,
        device_flops=(2250e12, "NVIDIA HGX B200 datasheet: 2.25 PFLOP/s bf16, dense (half of the sparse figure)"),
        utilization=(0.4, "assumption: as an H100; nothing published was found"),
        device_bytes=(180e9, "NVIDIA DGX B200 datasheet: 1440 GB, an eighth"),
        device_bandwidth=(8000e9, "NVIDIA DGX B200 datasheet: 64 TB/s, an eighth"),
        link_to_host=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        link_to_device=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        peer_bandwidth=(900e9, f"NVIDIA DGX B200 datasheet: NVLink 14.4 TB/s, an eighth; {_HALF_DUPLEX}"),
        network_bandwidth=(50e9, f"as a DGX H100: {_NDR}"),
        host_bytes=(2e12, "NVIDIA DGX B200 datasheet: 2 TB, up to 4"),
        host_bandwidth=(
            _STREAM * 16 * 44.8e9,
            f"the same: 2x Xeon Platinum 8570, 8 channels DDR5-5600 each (Intel ARK), 16 x 44.8e9; {_DDR}",
        ),
        cores=(112, "the same: 112"),
        adam_per_core=_ADAM,
        **_EIGHT_SSDS,
        disk_bytes=(8 * 3.84e12, "NVIDIA DGX B200 datasheet: 8 SSDs of 3.84 TB"),
    ),
)

HARDWARE: Mapping[str, Hardware] = {machine.name: machine for machine in _NAMED}


def hardware(name: str) -> Hardware:
    """The named machine.

    Raises:
        ValueError: no machine has this name.
    """
    if name not in HARDWARE:
        raise ValueError(
            f"hardware={name!r} is not known{nearest(name, HARDWARE) or '.'} There are {', '.join(HARDWARE)}; "
            'on the command line, "measured" stands for this machine'
        )
    return HARDWARE[name]


def hardware_of(
    findings: Mapping[str, Any], *, flops: float | None = None, device_bytes: float | None = None
) -> Hardware:
    """One device with the measured host.

    The device's bandwidth is that of AdamW on a resident parameter; the host's is the best of the in-place kernels with
    the most threads. Host updates take the same time per byte as in the measurement, for update windows of any length.

    Args:
        findings: the output of ``doctor --json``.
        flops: FLOP/s that a forward and backward reach on the device; None takes those of a large matrix product: an
            upper bound, so that more host work is hidden than predicted.
        device_bytes: memory of the device; None takes the host's if the device is the CPU.

    Raises:
        ValueError: ``findings`` is not an output of ``doctor``, or the device's memory is not known.
    """
    try:
        has, host, link = findings["machine"], findings["host"], findings["link"][0]
        on_cpu = link["memory"] == "memmove"
        if device_bytes is None and not on_cpu:
            raise ValueError(
                f"device_bytes=None must be bytes: doctor does not measure the memory of {has['device']}; pass it"
            )
        disk = findings["disk"] or dict.fromkeys(("read", "write", "free_bytes"))
        fewest, most = (select(host, key=lambda rates: rates["threads"]) for select in (min, max))
        return Hardware(
            name="measured",
            device_flops=findings["matmul_flops"] if flops is None else flops,
            utilization=1.0,
            device_bytes=has["memory_bytes"] if device_bytes is None else device_bytes,
            device_bandwidth=findings["resident"]["bytes"],
            link_to_host=link["to_host"],
            link_to_device=link["to_device"],
            host_bytes=has["memory_bytes"],
            host_bandwidth=max(most["add"], most["adam"]),
            cores=sum(len(cores) for cores in has["nodes"].values()),
            device_cores=sum(len(cores) for cores in has["nodes"].values()) if on_cpu else None,  # PyTorch's default
            adam_per_core=fewest["adam"] / fewest["threads"] / HOST_PASS_BYTES,
            disk_read=disk["read"],
            disk_write=disk["write"],
            disk_bytes=disk["free_bytes"],
            sources={"all": "zenflow-compile doctor"},
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{error!r} in the output of zenflow-compile doctor --json; run it again") from None
