"""What an engine does together with other ranks: gradients, weights, and the calls that all of them make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zenflow_compile.options.options import Options
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup
from zenflow_compile.runtime.recorder import Recorder
from zenflow_compile.runtime.step.gradient_reduction import GradientReduction
from zenflow_compile.runtime.step.step_messages import StepMessages
from zenflow_compile.runtime.step.weight_gather import Changed, WeightGather

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class RankCalls(StepMessages):
    """The calls of one engine that all ranks make, in the same order.

    Attributes:
        reduction: sends gradients.
    """

    def __init__(
        self,
        group: RankGroup,
        registry: ParamRegistry,
        device: torch.device,
        options: Options,
        recorder: Recorder,
    ) -> None:
        super().__init__(group, registry, recorder)
        self.reduction = GradientReduction(group, registry, device, _DTYPES[options.communication_data_type])
        self.weight_gather = WeightGather(group, device_of(device))

    def contribute(self, offloaded: OffloadedParam, grad: Tensor, *, send: bool) -> None:
        with self.group.announcing():
            self.reduction.contribute(offloaded, grad, send=send)

    def begin_backward(self) -> None:
        # The last update may have brought the selection by which a gradient is split, and this rank may not have
        # fetched the parameter.
        self.weight_gather.wait()
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
            head = self._step_message() + bytes([self.reduction.has_unsent()])
            writes = self._notice_writes(number)
            for offloaded in self._registry.offloaded.values():
                offloaded.receive_weights()
            rows = self.group.exchange(Call.STEP, head + writes)
            self._follow_writes([row[len(head) :] for row in rows])
            unsent = any(row[len(head) - 1] for row in rows)
            yielded = self._check_step(rows, gradients=not unsent)
            if unsent:
                self.reduction.finish()
            yield yielded
        self.group.step = number + 1

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
            self.weight_gather.wait()
            yield written
            merged = [each for each in self._registry.offloaded.values() if each.merged]
            self.weight_gather.gather([Changed(each, whole=True) for each in merged])
            for offloaded in merged:
                offloaded.receive_weights()
                if (sample := offloaded.weights.sample) is not None:
                    sample.follow()  # no step ends here, which would keep it

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
        self.weight_gather.gather(changed, apply)

    def gather_streamed(self, indices: Sequence[int]) -> None:
        """Bring streamed parameters that were updated to all ranks, which have updated the same ones."""
        streamed = self._registry.streamed.params
        self.weight_gather.gather_flat([streamed[index] for index in indices if streamed[index].plan.flat is not None])

    def list_memory(self, found: MemoryList) -> None:
        """Add the device's memory of gradients that were not sent, and of selections."""
        self.reduction.list_memory(found)
        self.weight_gather.list_memory(found)

    def release_stream(self) -> None:
        """Give the gather stream back, unless a rank failed: it may wait for that rank forever. Idempotent."""
        if not self.group.failed:
            self.weight_gather.close()

    def begin_state_dict(self) -> None:
        """Check that all ranks are about to gather their state.

        Raises:
            RankError: not all of them are.
        """
        self.group.exchange(Call.STATE)

    def forget(self) -> None:
        """Forget gradients and selections that were sent: a state is about to be loaded."""
        self.reduction.reset()
        self.weight_gather.forget()
