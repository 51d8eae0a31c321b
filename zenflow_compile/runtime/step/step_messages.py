"""What ranks tell each other in an optimizer step, and what must be equal on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from zenflow_compile.runtime.parameters.registry import ParamRegistry
from zenflow_compile.runtime.ranks.rank_group import Call, RankGroup, first_difference
from zenflow_compile.runtime.recorder import Recorder

_NUMBERS = ("lr", "betas", "eps", "weight_decay", "maximize")


class StepMessages:
    """The messages of the optimizer steps of one engine.

    Attributes:
        group: of the ranks.
        measured_window: the shortest update window that this rank's host keeps up with; None until it is measured.
    """

    def __init__(self, group: RankGroup, registry: ParamRegistry, recorder: Recorder) -> None:
        self.group = group
        group.recorder = recorder
        self._registry = registry
        self.measured_window: int | None = None

    def agree_on_load(self, refusal: str) -> None:
        """Tell the other ranks why this one cannot load its state, or that it can, with an empty text.

        Raises:
            ValueError: this rank can, and another one cannot.
            RankError: not all ranks call it, or one has failed.
        """
        refusals = self.group.gather_texts(Call.LOAD, refusal)
        for rank, text in enumerate(refusals):
            if text and not refusal:
                raise ValueError(f"rank {rank} cannot load its state dict, so no rank has loaded one: {text}")

    def _step_message(self) -> bytes:
        """What a rank tells the others in each step: 12 bytes."""
        return (
            (self.measured_window or 0).to_bytes(4, "little") + self._digest_of_groups() + self._digest_of_gradients()
        )

    def _check_step(self, rows: Sequence[bytes], *, gradients: bool) -> int | None:
        """Check that all ranks are about to do the same step.

        Args:
            rows: what the ranks have sent, which begins with ``_step_message``.
            gradients: all gradients have been sent, so that ranks have those of the same parameters.

        Returns:
            What rank 0 has measured: the shortest update window that its host keeps up with.

        Raises:
            RankError: they are not.
        """
        self._check_equal(rows, slice(4, 8), "values in param_groups")
        if gradients:
            self._check_equal(rows, slice(8, 12), "gradients in .grad")
        return int.from_bytes(rows[0][:4], "little") or None

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


def _digest(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")
