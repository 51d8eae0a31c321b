"""Device memory that ``offload_weights="auto"`` gives to kept weights, from the measured peak of a step."""

from __future__ import annotations

from zenflow_compile.runtime.device.device import Device

RESERVE = 20  # one of so many parts of the limit stays free: later steps differ, and allocators round up
_MEASURED = 3  # the optimizer step that begins behind a measured one: the first compiles, the second makes buffers


class WeightRoom:
    """What the peak of one step leaves of the device memory that this process may use.

    The peak is that of the allocator's statistics, which are reset. A number never depends on it: training is
    bit-identical with any weights kept, so a measurement that differs between runs is harmless.

    Args:
        limit_bytes: ``device_memory_bytes``; None: what is free now, and what PyTorch has reserved.

    Raises:
        ValueError: see ``check_room``.

    Attributes:
        limit_bytes: of device memory.
    """

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        check_room(device, limit_bytes)
        self._device = device
        self._steps = 0
        self.limit_bytes = _usable_bytes(device) if limit_bytes is None else limit_bytes

    def restart(self) -> None:
        """Measure again: there are other weights."""
        self._steps = 0

    def begin_step(self, *, steady: bool) -> int | None:
        """An optimizer step begins.

        Args:
            steady: since the last one, graphs have loaded weights, and no other code has held them.

        Returns:
            Bytes for weights besides what the device has had at the peak, behind the step that is measured; else None.
        """
        self._steps += 1
        if self._steps > _MEASURED:
            return None
        if self._steps < _MEASURED or not steady:
            self._steps = min(self._steps, _MEASURED - 1)
            self._device.reset_peak()
            return None
        peak = self._device.peak_bytes()
        assert peak is not None
        return self.limit_bytes - peak - self.limit_bytes // RESERVE


def check_room(device: Device, limit_bytes: int | None) -> None:
    """
    Raises:
        ValueError: the device does not count allocated memory, or has no limit that it could tell.
    """
    if device.peak_bytes() is None:
        raise ValueError(
            f'offload_weights="auto" needs a device that counts its allocated memory, which {device.torch_device} does '
            "not; pass the bytes that loaded weights may take, or the share of them that leaves the device, such as 0.5"
        )
    if limit_bytes is None and device.free_bytes() is None:
        raise ValueError(
            f'device_memory_bytes=None under offload_weights="auto" must be an integer >= 1 on {device.torch_device}, '
            "which has no memory of its own; pass the bytes that this process may use"
        )


def _usable_bytes(device: Device) -> int:
    device.reset_peak()  # the peak is what is allocated now
    free, allocated = device.free_bytes(), device.peak_bytes()
    assert free is not None
    assert allocated is not None
    return free + device.unused_bytes() + allocated
