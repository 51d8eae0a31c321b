"""The hardware that ``zenflow-compile doctor`` measured, as planning wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zenflow_compile.performance.hardware import Hardware
from zenflow_compile.performance.workload import HOST_PASS_BYTES

_SOURCE = "zenflow-compile doctor"


def hardware_of(
    findings: Mapping[str, Any], *, flops: float | None = None, device_bytes: float | None = None
) -> Hardware:
    """One device with the host that ``doctor`` saw.

    The device's bandwidth is that of AdamW on a whole parameter; the host's is the best that was reached in place with
    the most threads. Host updates are taken to be as fast per byte as in the measurement, whatever the length of the
    window.

    Args:
        findings: what ``doctor --json`` prints.
        flops: FLOP/s that a forward and backward reach on the device; None takes what a large product of matrices
            reaches: a bound, so that more host work is hidden than predicted.
        device_bytes: memory of the device; None takes the host's, where the device is the CPU.

    Raises:
        ValueError: ``findings`` is nothing that ``doctor`` printed, or the device's memory is not known.
    """
    try:
        has, host, link = findings["machine"], findings["host"], findings["link"][0]
        on_cpu = link["memory"] == "memmove"
        if device_bytes is None and not on_cpu:
            raise ValueError(
                f"device_bytes=None must be bytes: doctor does not say how much memory {has['device']} has; pass it"
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
            sources={"all": _SOURCE},
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{error!r} in what should be what zenflow-compile doctor --json prints; run it") from None
