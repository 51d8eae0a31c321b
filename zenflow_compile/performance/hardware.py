"""The numbers of a machine that plans and predictions read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zenflow_compile.checks.validate import check_integer

LEFT_FREE = 2
"""Cores per device left to PyTorch by default: one for the training thread, one for autograd's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node, or several as one. Rates are per second; each device has its own link, and all devices share the host.

    Attributes:
        nodes: that ``devices`` and everything of the host belong to, together; see ``across``.
        devices: of the node, each training on its own tokens and owning an equal share of the optimizer state.
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

    def across(self, nodes: int) -> Hardware:
        """``nodes`` equal nodes as one: devices that are alike have equal shares of all hosts.

        A ring goes over all devices, at the rate of its slowest link, which is the network's.

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
        slowest = min(rate for rate in (self.peer_bandwidth, self.network_bandwidth) if rate is not None)
        disk = (self.disk_read, self.disk_write, self.disk_bytes)
        disk_read, disk_write, disk_bytes = (None if each is None else nodes * each for each in disk)
        return replace(
            self,
            nodes=nodes * self.nodes,
            devices=nodes * self.devices,
            peer_bandwidth=slowest,
            host_bytes=nodes * self.host_bytes,
            host_bandwidth=nodes * self.host_bandwidth,
            cores=nodes * self.cores,
            device_cores=None if self.device_cores is None else nodes * self.device_cores,
            disk_read=disk_read,
            disk_write=disk_write,
            disk_bytes=disk_bytes,
        )

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
