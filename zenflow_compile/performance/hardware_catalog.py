"""Named machines, each number with its source. A source called an assumption was not read anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zenflow_compile.checks.validate import nearest
from zenflow_compile.performance.hardware import Hardware

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


def _machine(name: str, *, devices: int = 1, **numbers: tuple[float, str]) -> Hardware:
    """``numbers``: each with its source."""
    values: dict[str, Any] = {attribute: number for attribute, (number, _) in numbers.items()}
    sources = {attribute: source for attribute, (_, source) in numbers.items()}
    return Hardware(name=name, devices=devices, **values, sources=sources)


_NAMED = (
    _machine(
        "4xa100-40g-pcie4",
        devices=4,
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
        devices=4,
        device_flops=(989e12, "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bf16, dense"),
        utilization=(0.4, _LLAMA3_H100),
        device_bytes=(80e9, "NVIDIA H100 datasheet, 80 GB"),
        device_bandwidth=(3350e9, "NVIDIA H100 datasheet, SXM: 3.35 TB/s"),
        link_to_host=(55e9, _PINNED_PCIE5),
        link_to_device=(55e9, _PINNED_PCIE5),
        peer_bandwidth=(450e9, f"NVIDIA H100 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}"),
        network_bandwidth=(50e9, f"assumption, as in a larger node: {_NDR}"),
        host_bytes=(512 * 2**30, "assumption: 16 DIMMs of 32 GiB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"2x Xeon Platinum 8468, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(96, "Intel ARK, Xeon Platinum 8468: 48 each"),
        adam_per_core=_ADAM,
        disk_read=(6.8e9, "assumption: one PCIe 4.0 data centre SSD"),
        disk_write=(4.0e9, "assumption: the same"),
        disk_bytes=(3.8e12, "assumption: the same, 3.84 TB"),
    ),
    _machine(
        "8xh100-80g",
        devices=8,
        device_flops=(989e12, "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bf16, dense"),
        utilization=(0.4, _LLAMA3_H100),
        device_bytes=(80e9, "NVIDIA H100 datasheet, 80 GB"),
        device_bandwidth=(3350e9, "NVIDIA H100 datasheet, SXM: 3.35 TB/s"),
        link_to_host=(55e9, _PINNED_PCIE5),
        link_to_device=(55e9, _PINNED_PCIE5),
        peer_bandwidth=(450e9, f"NVIDIA H100 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}"),
        network_bandwidth=(50e9, _NDR),
        host_bytes=(2e12, "NVIDIA DGX H100 datasheet: 2 TB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"the same: 2x Xeon Platinum 8480C, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(112, "the same: 112"),
        adam_per_core=_ADAM,
        disk_read=(8 * 6.8e9, "assumption: eight PCIe 4.0 data centre SSDs in RAID 0"),
        disk_write=(8 * 4.0e9, "assumption: the same"),
        disk_bytes=(8 * 3.84e12, "NVIDIA DGX H100 datasheet: 8 SSDs of 3.84 TB"),
    ),
    _machine(
        "4xv100-32g",
        devices=4,
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
        device_flops=(989e12, "NVIDIA H200 datasheet, SXM: 989 TFLOP/s bf16, dense (half of the sparse figure)"),
        utilization=(0.4, _LLAMA3_H100),
        device_bytes=(141e9, "NVIDIA H200 datasheet, 141 GB"),
        device_bandwidth=(4800e9, "NVIDIA H200 datasheet: 4.8 TB/s"),
        link_to_host=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        link_to_device=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        host_bytes=(256 * 2**30, "one of the eight devices of a DGX H200 (2x Xeon Platinum 8480C, 2 TB): an eighth"),
        host_bandwidth=(_STREAM * 2 * 38.4e9, f"the same: 16 channels DDR5-4800, an eighth is 2 x 38.4e9; {_DDR}"),
        cores=(14, "the same: 112, an eighth"),
        adam_per_core=_ADAM,
        disk_read=(6.8e9, "assumption: one PCIe 4.0 data centre SSD"),
        disk_write=(4.0e9, "assumption: the same"),
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
        disk_read=(7.45e9, "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s"),
        disk_write=(6.9e9, "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s"),
        disk_bytes=(2e12, "Samsung 990 Pro, 2 TB"),
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
        disk_read=(7.45e9, "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s"),
        disk_write=(6.9e9, "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s"),
        disk_bytes=(2e12, "Samsung 990 Pro, 2 TB"),
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
        disk_read=(7.45e9, "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s"),
        disk_write=(6.9e9, "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s"),
        disk_bytes=(2e12, "Samsung 990 Pro, 2 TB"),
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
        disk_read=(7.45e9, "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s"),
        disk_write=(6.9e9, "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s"),
        disk_bytes=(2e12, "Samsung 990 Pro, 2 TB"),
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
        disk_read=(6.8e9, "assumption: one PCIe 4.0 data centre SSD"),
        disk_write=(4.0e9, "assumption: the same"),
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
        disk_read=(6.8e9, "assumption: one PCIe 4.0 data centre SSD"),
        disk_write=(4.0e9, "assumption: the same"),
        disk_bytes=(3.8e12, "DGX A100 datasheet: 8 SSDs of 3.84 TB, an eighth"),
    ),
    _machine(
        "8xh200-141g",
        devices=8,
        device_flops=(989e12, "NVIDIA H200 datasheet, SXM: 989 TFLOP/s bf16, dense (half of the sparse figure)"),
        utilization=(0.4, _LLAMA3_H100),
        device_bytes=(141e9, "NVIDIA H200 datasheet, 141 GB"),
        device_bandwidth=(4800e9, "NVIDIA H200 datasheet: 4.8 TB/s"),
        link_to_host=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        link_to_device=(55e9, f"as an H100: {_PINNED_PCIE5}"),
        peer_bandwidth=(450e9, f"NVIDIA H200 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}"),
        network_bandwidth=(50e9, f"as a DGX H100: {_NDR}"),
        host_bytes=(2e12, "NVIDIA DGX H200 datasheet: 2 TB"),
        host_bandwidth=(
            _STREAM * 16 * 38.4e9,
            f"the same: 2x Xeon Platinum 8480C, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
        ),
        cores=(112, "the same: 112"),
        adam_per_core=_ADAM,
        disk_read=(8 * 6.8e9, "assumption: eight PCIe 4.0 data centre SSDs in RAID 0"),
        disk_write=(8 * 4.0e9, "assumption: the same"),
        disk_bytes=(8 * 3.84e12, "NVIDIA DGX H200 datasheet: 8 SSDs of 3.84 TB"),
    ),
    _machine(
        "8xb200-180g",
        devices=8,
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
        disk_read=(8 * 6.8e9, "assumption: eight PCIe 4.0 data centre SSDs in RAID 0"),
        disk_write=(8 * 4.0e9, "assumption: the same"),
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
