"""Factors on gradients, from clipping, other scaling in place, and loss scaling.

On the CPU a factor is a number. On a device with streams it is f64[] on the device until the optimizer step, and a
late ``Number`` from then on: neither clipping nor the step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zenflow_compile.runtime.device.copy_lanes import CopyLane, Ticket
from zenflow_compile.runtime.device.device import Device
from zenflow_compile.runtime.device.number import Number

Factor = float | Tensor
"""A factor on a gradient: a number, or f64[] on a device."""


class FinalFactors(NamedTuple):
    """The factors that an optimizer step uses: all of them, and the one from loss scaling."""

    grad_scale: Number = Number.known(1.0)
    unscale: Number = Number.known(1.0)


UNSCALED = FinalFactors()


class Scaled(Protocol):
    """A gradient with factors: a ``GradientRecord``."""

    clip: Factor
    unscale: Factor
    final: FinalFactors


class Factors:
    """Multiplies factors. Gradients that are multiplied with one tensor share the product.

    Attributes:
        deferred: factors stay on the device; False reads each one at once, which is free on the CPU.
    """

    def __init__(self, device: torch.device, *, deferred: bool) -> None:
        self.deferred = deferred
        self._device = device
        self._last: tuple[Factor, Tensor, int, bool, Factor] | None = None
        self._copies: list[Ticket] = []

    def times(self, before: Factor, by: float | Tensor, *, divide: bool = False) -> Factor:
        """``before * by``, or ``before / by``. ``by`` has one element, and may change after the call."""
        # A tensor of the host is read at once: its copy to the device would wait for the device.
        if not (self.deferred and isinstance(by, Tensor) and by.device.type == self._device.type):
            number = float(by)
            if not divide:
                return before * number
            return before * (1.0 / number if number else math.copysign(math.inf, number))  # as IEEE divides
        last = self._last
        version = -1 if by.is_inference() else by._version  # tensors of inference mode have no version
        # The memo keeps ``by`` alive, so that no other tensor can have its identity. Writes through ``by.data`` between
        # two calls go unnoticed: they do not move the version.
        known = last is not None and last[1] is by and last[2:4] == (version, divide) and version >= 0
        if known and last is not None and _key(last[0]) == _key(before):
            return last[4]
        value = by.detach().reshape(()).to(self._device, torch.float64, copy=True)
        # The reciprocal first, as above: both paths have the same bits.
        product = before * value.reciprocal() if divide else before * value
        self._last = before, by, version, divide, product
        return product

    def forget(self) -> None:
        self._last = None
        self._copies = [each for each in self._copies if not each.done()]

    def finish(self, records: Iterable[Scaled], to_host: CopyLane, device: Device, *, step: int) -> None:
        """Set ``final`` of ``records``, which have factors on the device. Starts one copy, and waits for nothing."""
        self._last = None
        found: dict[tuple[bool, float], Tensor] = {}
        products: dict[tuple[tuple[bool, float], tuple[bool, float]], Factor] = {}
        scaled: list[tuple[Scaled, Factor]] = []
        for record in records:
            clip, unscale = record.clip, record.unscale
            pair = _key(clip), _key(unscale)
            if (product := products.get(pair)) is None:
                product = products[pair] = product_of(clip, unscale)
            scaled.append((record, product))
            for factor in (product, unscale):
                if isinstance(factor, Tensor):
                    found[_key(factor)] = factor
        if not found:
            return
        numbers = dict(zip(found, self._late(list(found.values()), to_host, device, step), strict=True))
        for record, product in scaled:
            record.final = FinalFactors(
                *(
                    numbers[_key(each)] if isinstance(each, Tensor) else Number.known(each)
                    for each in (product, record.unscale)
                )
            )

    def _late(self, tensors: Sequence[Tensor], to_host: CopyLane, device: Device, step: int) -> list[Number]:
        # A row for each: 16 bytes apart, as Triton compiles kernels for aligned pointers apart from others.
        packed = torch.stack(list(tensors)).unsqueeze(1).repeat(1, 2)
        host = device.host_zeros(packed.shape, torch.float64)
        try:
            copy = to_host.submit(host, packed, step=step, param="factors")
        except BaseException:
            to_host.settle()  # an interrupt may have come after the submission, and the copy uses both tensors
            raise
        # A ticket keeps both tensors of its copy alive. The numbers may be dropped before the copy is over.
        self._copies = [each for each in self._copies if not each.done()] + [copy]
        cells = zip(packed[:, 0].unbind(), host[:, 0].unbind(), strict=True)
        return [Number(on_device, (copy,), (cell,)) for on_device, cell in cells]


def product_of(one: Factor, other: Factor) -> Factor:
    """``one * other``; one of them itself if the other is 1."""
    for factor, rest in ((one, other), (other, one)):
        if isinstance(factor, float) and factor == 1.0:
            return rest
    return one * other


def multiply_(values: Tensor, factor: Factor) -> None:
    """Multiply in place, with one rounding of each element to its dtype."""
    if isinstance(factor, float):
        values.mul_(factor)
        return
    # An accelerator would round a factor in its memory to 16 bits before it multiplies.
    wide = torch.promote_types(values.dtype, torch.float32)
    values.copy_(values.to(wide).mul_(factor.to(wide))) if wide != values.dtype else values.mul_(factor.to(wide))


def _key(factor: Factor) -> tuple[bool, float]:
    """By identity, which is unique only while the tensor is alive, or by value: no comparison reads the device."""
    return (True, id(factor)) if isinstance(factor, Tensor) else (False, factor)
