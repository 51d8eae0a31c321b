"""What the engines of a sharded model do together: each updates the parts that its rank has."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zenflow_compile.runtime.parameters.offloaded_param import OffloadedParam
from zenflow_compile.runtime.ranks.rank_group import Call
from zenflow_compile.runtime.step.step_messages import StepMessages

_ROUNDING = 1e-5
"""Relative difference of f32 norms that are of the same values, on processors that add them up in another order."""


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

    def norm_of(self, parts: Tensor, whole: Tensor | None) -> Tensor:
        """The L2 norm f32[] of all gradients, the same bits on all ranks.

        Args:
            parts: f32[], the norm of the parts that this rank has of sharded parameters' gradients.
            whole: f32[], that of parameters which are whole on each rank: it counts one time. None without any.

        Raises:
            RankError: ranks have other gradients of these, or one has failed.
        """
        squares = self.group.all_reduce(parts.square()).wait("the norm of the gradients")
        if whole is not None:
            squares.add_(self._agreed_norm(whole) ** 2)
        return squares.sqrt_()

    def _agreed_norm(self, own: Tensor) -> float:
        """Return rank 0's norm of gradients that the loop averages. With other gradients, ranks would clip differently.

        The host waits for it; models that are sharded as a whole have no such gradients.
        """
        rows = self.group.exchange(Call.STEP, struct.pack("<d", float(own)))
        norms: list[float] = [struct.unpack("<d", row)[0] for row in rows]
        for rank, norm in enumerate(norms):
            if not (math.isclose(norms[0], norm, rel_tol=_ROUNDING) or (math.isnan(norms[0]) and math.isnan(norm))):
                raise self.group.failure(
                    f"rank 0 and rank {rank} have different gradients of the parameters that are not sharded in step "
                    f"{self.group.step}, with norms of {norms[0]:.6g} and {norm:.6g}: the loop averages them over all "
                    "ranks between backward() and step(), as by torch.distributed.all_reduce(p.grad)"
                )
        return norms[0]
