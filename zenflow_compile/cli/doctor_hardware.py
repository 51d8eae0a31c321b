"""Converts the output of ``zenflow-compile doctor`` to a ``Hardware``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.workload import HOST_PASS_BYTES


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
