"""Named machines, each number with its source. A source called an assumption was not read anywhere."""

from __future__ import annotations

from collections.abc import Mapping

from zenflow_compile.checks.validate import nearest
from zenflow_compile.performance.hardware import Hardware

_MEGATRON_A100 = "assumption: 0.44 to 0.52 of an A100's peak, Narayanan et al., SC '21 (arXiv 2104.04473), Table 1"
_LLAMA3_H100 = "assumption: 0.38 to 0.43 of an H100's peak, Llama 3 (arXiv 2407.21783), Table 4; without offloading"
_STREAM = 0.8
_DDR = "times 0.8: the share of a channel's peak that streaming reaches is an assumption; ``doctor`` measures yours"
_ADAM = (
    "assumption: one AVX-512 core of this project's benchmarks/results/host_adam.json (bf16, 1 gradient); "
    "with all cores the host's memory limits first"
)
_PINNED_PCIE4 = "PCIe 4.0 x16 carries 31.5e9 each way (PCI-SIG), pinned copies about 0.8 of that (assumption)"
_PINNED_PCIE5 = "Deep Optimizer States (Middleware '24): B = 55 GB/s per GPU for its 4x H100; PCIe 5.0 x16 carries 63e9"
_HALF_DUPLEX = "NVLink datasheet figure counts both directions; half of it"

_NAMED = (
    Hardware(
        name="4xa100-40g-pcie4",
        devices=4,
        device_flops=312e12,
        utilization=0.45,
        device_bytes=40e9,
        device_bandwidth=1555e9,
        link_to_host=25e9,
        link_to_device=25e9,
        peer_bandwidth=300e9,
        host_bytes=512 * 2**30,
        host_bandwidth=_STREAM * 8 * 25.6e9,
        cores=32,
        adam_per_core=0.57e9,
        disk_read=6.4e9,
        disk_write=4.0e9,
        disk_bytes=3.2e12,
        sources={
            "device_flops": "NVIDIA A100 datasheet: 312 TFLOP/s bf16, dense",
            "utilization": _MEGATRON_A100,
            "device_bytes": "NVIDIA A100 datasheet, 40 GB",
            "device_bandwidth": "NVIDIA A100 datasheet: 1555 GB/s (40 GB)",
            "link_to_host": _PINNED_PCIE4,
            "link_to_device": _PINNED_PCIE4,
            "peer_bandwidth": f"NVIDIA A100 datasheet: NVLink 600 GB/s; {_HALF_DUPLEX}",
            "host_bytes": "a node of Polaris (Argonne, machine overview): EPYC 7543P, 512 GiB",
            "host_bandwidth": f"same: 8 channels DDR4-3200, 8 x 25.6e9; {_DDR}",
            "cores": "same: 32",
            "adam_per_core": _ADAM,
            "disk_read": "assumption: two PCIe 4.0 SSDs in RAID 0, of the class of 3.2e9 each",
            "disk_write": "assumption: the same, 2.0e9 each",
            "disk_bytes": "Polaris: two SSDs of 1.6 TB in RAID 0",
        },
    ),
    Hardware(
        name="4xh100-80g",
        devices=4,
        device_flops=989e12,
        utilization=0.4,
        device_bytes=80e9,
        device_bandwidth=3350e9,
        link_to_host=55e9,
        link_to_device=55e9,
        peer_bandwidth=450e9,
        host_bytes=512 * 2**30,
        host_bandwidth=_STREAM * 16 * 38.4e9,
        cores=96,
        adam_per_core=0.57e9,
        disk_read=6.8e9,
        disk_write=4.0e9,
        disk_bytes=3.8e12,
        sources={
            "device_flops": "NVIDIA H100 datasheet, SXM: 989 TFLOP/s bf16, dense",
            "utilization": _LLAMA3_H100,
            "device_bytes": "NVIDIA H100 datasheet, 80 GB",
            "device_bandwidth": "NVIDIA H100 datasheet, SXM: 3.35 TB/s",
            "link_to_host": _PINNED_PCIE5,
            "link_to_device": _PINNED_PCIE5,
            "peer_bandwidth": f"NVIDIA H100 datasheet: NVLink 900 GB/s; {_HALF_DUPLEX}",
            "host_bytes": "assumption: 16 DIMMs of 32 GiB",
            "host_bandwidth": f"2x Xeon Platinum 8468, 8 channels DDR5-4800 each, 16 x 38.4e9; {_DDR}",
            "cores": "Intel ARK, Xeon Platinum 8468: 48 each",
            "adam_per_core": _ADAM,
            "disk_read": "assumption: one PCIe 4.0 data centre SSD",
            "disk_write": "assumption: the same",
            "disk_bytes": "assumption: the same, 3.84 TB",
        },
    ),
    Hardware(
        name="4xv100-32g",
        devices=4,
        device_flops=125e12,
        utilization=0.3,
        device_bytes=32e9,
        device_bandwidth=900e9,
        link_to_host=12e9,
        link_to_device=12e9,
        peer_bandwidth=150e9,
        host_bytes=192 * 2**30,
        host_bandwidth=_STREAM * 12 * 23.5e9,
        cores=40,
        adam_per_core=0.57e9,
        sources={
            "device_flops": "NVIDIA V100 datasheet, SXM2: 125 TFLOP/s fp16",
            "utilization": "assumption: 39 of 125 TFLOP/s, Megatron-LM (arXiv 1909.08053), section 5.1",
            "device_bytes": "NVIDIA V100 datasheet, 32 GB",
            "device_bandwidth": "NVIDIA V100 datasheet: 900 GB/s",
            "link_to_host": "Deep Optimizer States: B = 3e9 fp32 parameters/s, which is 12 GB/s, on its V100 testbed",
            "link_to_device": "the same",
            "peer_bandwidth": f"NVIDIA V100 datasheet: NVLink 300 GB/s; {_HALF_DUPLEX}",
            "host_bytes": "assumption: 12 DIMMs of 16 GiB",
            "host_bandwidth": f"assumption: 2x Xeon Gold 6230, 6 channels DDR4-2933 each, 12 x 23.5e9; {_DDR}",
            "cores": "assumption: the same, 20 each (Intel ARK)",
            "adam_per_core": _ADAM,
        },
    ),
    Hardware(
        name="gh200",
        device_flops=989e12,
        utilization=0.4,
        device_bytes=96e9,
        device_bandwidth=4000e9,
        link_to_host=297e9,
        link_to_device=375e9,
        host_bytes=480e9,
        host_bandwidth=486e9,
        cores=72,
        adam_per_core=0.57e9,
        sources={
            "device_flops": "NVIDIA GH200 datasheet: 989 TFLOP/s bf16, dense (half of the sparse figure)",
            "utilization": _LLAMA3_H100,
            "device_bytes": "NVIDIA GH200 datasheet, 96 GB HBM3",
            "device_bandwidth": "NVIDIA GH200 datasheet: 4 TB/s",
            "link_to_host": "measured over NVLink-C2C by Schieffer et al. (ICPP '24, arXiv 2407.07850); 450e9 nominal",
            "link_to_device": "the same",
            "host_bytes": "NVIDIA GH200 datasheet, 480 GB LPDDR5X",
            "host_bandwidth": "STREAM, Schieffer et al. (the same); 512e9 nominal",
            "cores": "NVIDIA GH200 datasheet: 72 Neoverse V2",
            "adam_per_core": "assumption: one AVX-512 core of benchmarks/results/host_adam.json; not measured on Arm",
        },
    ),
    Hardware(
        name="h200",
        device_flops=989e12,
        utilization=0.4,
        device_bytes=141e9,
        device_bandwidth=4800e9,
        link_to_host=55e9,
        link_to_device=55e9,
        host_bytes=256 * 2**30,
        host_bandwidth=_STREAM * 2 * 38.4e9,
        cores=14,
        adam_per_core=0.57e9,
        disk_read=6.8e9,
        disk_write=4.0e9,
        disk_bytes=3.8e12,
        sources={
            "device_flops": "NVIDIA H200 datasheet, SXM: 989 TFLOP/s bf16, dense (half of the sparse figure)",
            "utilization": _LLAMA3_H100,
            "device_bytes": "NVIDIA H200 datasheet, 141 GB",
            "device_bandwidth": "NVIDIA H200 datasheet: 4.8 TB/s",
            "link_to_host": f"as an H100: {_PINNED_PCIE5}",
            "link_to_device": f"as an H100: {_PINNED_PCIE5}",
            "host_bytes": "one of the eight devices of a DGX H200 (2x Xeon Platinum 8480C, 2 TB): an eighth",
            "host_bandwidth": f"the same: 16 channels DDR5-4800, an eighth is 2 x 38.4e9; {_DDR}",
            "cores": "the same: 112, an eighth",
            "adam_per_core": _ADAM,
            "disk_read": "assumption: one PCIe 4.0 data centre SSD",
            "disk_write": "assumption: the same",
            "disk_bytes": "DGX H200 datasheet: 8 SSDs of 3.84 TB, an eighth",
        },
    ),
    Hardware(
        name="rtx-4090",
        device_flops=165.2e12,
        utilization=0.45,
        device_bytes=24e9,
        device_bandwidth=1008e9,
        link_to_host=25e9,
        link_to_device=25e9,
        host_bytes=64 * 2**30,
        host_bandwidth=_STREAM * 2 * 41.6e9,
        cores=16,
        adam_per_core=0.57e9,
        disk_read=7.45e9,
        disk_write=6.9e9,
        disk_bytes=2e12,
        sources={
            "device_flops": "NVIDIA Ada whitepaper: 165.2 TFLOP/s fp16 with fp32 accumulation, dense",
            "utilization": "assumption: as an A100; nothing published was found",
            "device_bytes": "NVIDIA RTX 4090: 24 GB",
            "device_bandwidth": "NVIDIA Ada whitepaper: 1008 GB/s",
            "link_to_host": _PINNED_PCIE4,
            "link_to_device": _PINNED_PCIE4,
            "host_bytes": "assumption: a desktop with two DIMMs of 32 GiB",
            "host_bandwidth": f"assumption: the same, 2 channels DDR5-5200, 2 x 41.6e9; {_DDR}",
            "cores": "assumption: Ryzen 9 7950X (AMD): 16",
            "adam_per_core": _ADAM,
            "disk_read": "Samsung 990 Pro datasheet, 2 TB: 7450 MB/s",
            "disk_write": "Samsung 990 Pro datasheet, 2 TB: 6900 MB/s",
            "disk_bytes": "Samsung 990 Pro, 2 TB",
        },
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
