"""What the engines of a sharded model do together: each updates the parts that its rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.rank_group import Call
from zenflow_compile.runtime.step.step_messages import StepMessages


class ShardCalls(StepMessages):
    """The calls of one engine that all ranks of a sharded model make, in the same order."""

    @contextmanager
    def step(self, number: int) -> Iterator[int | None]:
        """Run an optimizer step inside of the block.

        Yields:
            What rank 0 has measured: the shortest update window that its host keeps up with.

        Raises:
            RankError: not all ranks call it, one has failed, or they have other gradients or rates.
        """
        self.group.step = number
        with self.group.announcing():
            rows = self.group.exchange(Call.STEP, self._step_message())
            yield self._check_step(rows, gradients=True)
        self.group.step = number + 1

    @contextmanager
    def ending(self, call: Call) -> Iterator[None]:
        """Apply all update windows inside of the block, in ``flush`` or ``close``: all ranks do, or none.

        Raises:
            RankError: not all ranks call it, or one has failed.
        """
        with self.group.announcing():
            self.group.exchange(call)
            yield

    def sum_norms(self, params: Sequence[OffloadedParam]) -> None:
        """Add up the squared norms of slices over the ranks that have a part of each, by which these are selected.

        Args:
            params: that have a gradient; the same ones on all ranks.
        """
        divided = [each for each in params if (shard := each.plan.shard) is not None and not shard.divides_slices]
        divided = [each for each in divided if each.plan.selects]
        if not divided:
            return
        self._registry.gradients.measure()  # norms of this rank's parts, which ``.grad`` shows
        norms = torch.cat([each.device.norms for each in divided])
        sums = self.group.all_reduce(norms).wait("the norms of slices")
        for each, part in zip(divided, torch.split(sums, [each.plan.slices for each in divided]), strict=True):
            each.device.norms = part

    def norm_of(self, parts: Tensor, whole: Tensor) -> Tensor:
        """The L2 norm f32[] of all gradients, equal on all ranks that shard the model.

        Args:
            parts: f32[], the norm of the parts that this rank has of sharded parameters' gradients.
            whole: f32[], that of parameters which are whole on each rank: it counts one time. Where ranks have other
                gradients of these, their mean counts: ranks must scale their parts of a gradient by one factor.
        """
        squares = torch.stack([parts, whole]).square_()
        over_ranks = self.group.all_reduce(squares).wait("the norm of the gradients")
        return (over_ranks[0] + over_ranks[1] / self.group.sharing).sqrt_()
