"""What an engine does together with other ranks: gradients, weights, and the calls that all of them make."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zenflow_compile.options.options import Options
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup, first_difference
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction
from zenflow_compile.runtime.step.weight_gather import Changed, WeightGather

_NUMBERS = ("lr", "betas", "eps", "weight_decay", "maximize")
_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


def _digest(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


class RankCalls:
    """The calls of one engine that all ranks make, in the same order.

    Attributes:
        group: of the ranks.
        reduction: sends gradients.
        measured_window: the shortest update window that this rank's host keeps up with; None until it is measured.
    """

    def __init__(
        self,
        group: RankGroup,
        registry: ParamRegistry,
        device: torch.device,
        options: Options,
        recorder: Recorder,
    ) -> None:
        self.group = group
        group.recorder = recorder
        self.reduction = GradientReduction(group, registry, device, _DTYPES[options.communication_data_type])
        self._weights = WeightGather(group, device_of(device))
        self._registry = registry
        self.measured_window: int | None = None

    def contribute(self, offloaded: OffloadedParam, grad: Tensor, *, send: bool) -> None:
        """See :meth:`GradientReduction.contribute`."""
        with self.group.announcing():
            self.reduction.contribute(offloaded, grad, send=send)

    def begin_backward(self) -> None:
        """See :meth:`GradientReduction.begin_backward`."""
        # The last update may have brought the selection by which a gradient is split, and this rank may not have
        # fetched the parameter.
        self._weights.wait()
        self.reduction.begin_backward()

    def end_backward(self) -> None:
        """Receive the gradients of the last backward before an optimizer step, which is over."""
        with self.group.announcing():
            self.reduction.finish()

    @contextmanager
    def step(self, number: int) -> Iterator[int | None]:
        """Run an optimizer step inside of the block. Gradients that wait for declared backwards are sent first.

        Yields:
            What rank 0 has measured: the shortest update window that its host keeps up with.

        Raises:
            RankError: not all ranks call it, one has failed, or they have other gradients or rates.
        """
        self.group.step = number
        with self.group.announcing():
            content = (self.measured_window or 0).to_bytes(4, "little") + self._digest_of_groups()
            unsent = bytes([self.reduction.has_unsent()])
            head = content + unsent + self._digest_of_gradients()
            writes = self._notice_writes(number)
            for offloaded in self._registry.offloaded.values():
                offloaded.receive_weights()
            rows = self.group.exchange(Call.STEP, head + writes)
            self._follow_writes([row[len(head) :] for row in rows])
            self._check_equal(rows, slice(4, 8), "values in param_groups")
            if any(row[8] for row in rows):
                self.reduction.finish()
            else:
                self._check_equal(rows, slice(9, 13), "gradients in .grad")
            yield int.from_bytes(rows[0][:4], "little") or None
        self.group.step = number + 1

    def _check_equal(self, rows: Sequence[bytes], part: slice, what: str) -> None:
        if (rank := first_difference([row[part] for row in rows])) is not None:
            raise self.group.failure(
                f"rank 0 and rank {rank} have different {what} in step {self.group.step}: with a process_group all "
                "ranks set, clear and schedule them alike"
            )

    def _digest_of_gradients(self) -> bytes:
        """Return a checksum of which parameters have a gradient: a step on other ones would send other slices."""
        return _digest(bytes(param.grad is not None for param in self._registry.params))

    def _digest_of_groups(self) -> bytes:
        """Return a checksum of learning rates and the like, without tensors: a read of them may wait for the device."""
        values = [group[name] for group in self._registry.groups for name in _NUMBERS]
        return _digest(repr([value for value in values if not isinstance(value, Tensor)]).encode())

    @contextmanager
    def ending(self, call: Call, number: int) -> Iterator[set[int]]:
        """Apply all update windows inside of the block, in ``flush`` or ``close``; ranks exchange the slices behind it.

        Yields:
            Parameters whose weights were written on any rank.

        Raises:
            RankError: not all ranks call it, or one has failed.
        """
        with self.group.announcing():
            written = self._follow_writes(self.group.exchange(call, self._notice_writes(number)))
            # Hazard: uploads that start inside of the block take buffers that the last gather may still read.
            self._weights.wait()
            yield written
            merged = [each for each in self._registry.offloaded.values() if each.merged]
            self._weights.gather([Changed(each, whole=True) for each in merged])
            for offloaded in merged:
                offloaded.receive_weights()

    def _notice_writes(self, now: int) -> bytes:
        """Look which parameters were written in this rank's share. Returns a byte for each, for all ranks.

        A rank compares its own slices with their masters. A write to another rank's slices drops updates there, and the
        ranks would gather different slices.
        """
        written = bytearray(len(self._registry.params))
        for index, offloaded in self._registry.offloaded.items():
            if offloaded.weights.written_by_others:
                offloaded.notice_external_write(now)
            written[index] = offloaded.written
            offloaded.written = False
        return bytes(written)

    def _follow_writes(self, rows: Sequence[bytes]) -> set[int]:
        """Drop the updates in flight that another rank has dropped. Returns what any rank has written."""
        found = set()
        for index, offloaded in self._registry.offloaded.items():
            if any(row[index] for row in rows):
                found.add(index)
                offloaded.drop_updates()
                offloaded.written = False
        return found

    def gather_weights(
        self, now: int, updated: Sequence[OffloadedParam], apply: Callable[[OffloadedParam], None]
    ) -> None:
        """Bring what a step has changed to all ranks. Where the device has streams, it goes on behind the step.

        Args:
            now: number of steps so far.
            updated: parameters that had a gradient.
            apply: applies the due updates of a parameter.
        """
        have_slices = {each.plan.index for each in updated if each.plan.whole.k}
        changed = []
        for index, offloaded in self._registry.offloaded.items():
            whole = offloaded.merged or bool(offloaded.due(now))
            if whole or index in have_slices:
                changed.append(Changed(offloaded, whole=whole))
        changed.sort(key=lambda each: self.reduction.first_use(each.offloaded.plan.index))
        self._weights.gather(changed, apply)

    def gather_streamed(self, indices: Sequence[int]) -> None:
        """Bring streamed parameters that were updated to all ranks, which have updated the same ones."""
        streamed = self._registry.streamed.params
        self._weights.gather_flat([streamed[index] for index in indices if streamed[index].plan.flat is not None])

    def release_stream(self) -> None:
        """Give the gather stream back, unless a rank failed: it may wait for that rank forever. Idempotent."""
        if not self.group.failed:
            self._weights.close()

    def begin_state_dict(self) -> None:
        """Check that all ranks are about to gather their state.

        Raises:
            RankError: not all of them are.
        """
        self.group.exchange(Call.STATE)

    def forget(self) -> None:
        """Forget gradients and selections that were sent: a state is about to be loaded."""
        self.reduction.reset()
        self._weights.forget()
