"""The gradient of one offloaded parameter: its state, and the factors on its values."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.gradients.factors import UNSCALED, Factor, Factors, multiply_, product_of


class GradientState(enum.Enum):
    """Where the values of a gradient are, and whether an optimizer step has used them.

    ``away`` states belong to the engine: the next optimizer step uses such a gradient. A gradient in any other state is
    no longer the engine's.

    Attributes:
        away: the values are in engine memory, for the next optimizer step.
        gone: there are no values.
    """

    PARTS = "parts"
    """Away: split. The selected slices are on the device, the deferred ones on their way to the host."""
    LOCAL = "local"
    """Away: this rank's contributions, whose mean over ranks is not known yet."""
    ON_DEVICE = "on device"
    """Away: unsplit, in the engine's accumulator. It is split when it is final."""
    ZERO = "zero"
    """All zero (``zero_()``, ``zero_grad(set_to_none=False)``), without memory."""
    DENSE = "dense"
    """A dense tensor, which users may have changed or may hold a view of: it counts until it is dropped."""
    CONSUMED = "consumed"
    """An optimizer step has used it, and its parts may be overwritten at any time."""
    SPOILED = "spoiled"
    """A backward has added to it after an optimizer step had used it: the sum is unknown."""
    DISCARDED = "discarded"
    """It was dropped before any optimizer step, and no tensor of it was alive then."""
    IN_BACKWARD = "in backward"
    """The optimizer-in-backward form has consumed the gradient inside the backward; ``.grad`` has no values."""

    def __init__(self, description: str) -> None:
        # Attributes, since every gradient asks several times per step: a property costs ten times as much.
        self.away = description in ("parts", "on device", "local")
        self.gone = not self.away and description not in ("zero", "dense")


class GradientLike(NamedTuple):
    """Name, shape, dtype and device that all gradients of one parameter have."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class GradientSource(Protocol):
    """The engine's side of the gradients of one parameter.

    ``values_of`` returns a new dense tensor, and ``norm_of`` the L2 norm f32[], of a gradient that is away, without its
    factors; the norm is None if it was overwritten. ``norm_of_values`` is the norm of a dense gradient, the same bits
    as before it became dense. ``give_up`` frees the parts of a gradient that is no longer the engine's. ``accumulate``
    adds what autograd accumulates into ``.grad``. ``averaged`` gradients are the mean over several ranks.
    """

    def values_of(self, record: GradientRecord) -> Tensor: ...
    def norm_of(self, record: GradientRecord) -> Tensor | None: ...
    def norm_of_values(self, values: Tensor) -> Tensor: ...
    def give_up(self, record: GradientRecord) -> None: ...
    def accumulate(self, record: GradientRecord, grad: Tensor) -> None: ...
    def became_dense(self) -> None: ...
    @property
    def factors(self) -> Factors: ...
    @property
    def averaged(self) -> bool: ...


class GradientRecord:
    """One gradient, from its first contribution until no tensor and no engine refers to it.

    The engine and every ``OffloadedGradient`` of this gradient hold the record; the record holds neither, so that a
    parameter, its ``.grad`` and its engine form no cycle that the collector cannot see. It refers to the engine's side
    weakly: a tensor that a user keeps does not keep a model alive.

    Attributes:
        state: see ``GradientState``.
        contributions: number of gradients added up in it since it was made or zeroed.
        clip: factor on its values from scaling in place, such as clipping.
        unscale: factor from loss scaling. Selection scores use it, but not ``clip``.
        final: both, for the optimizer step that has begun.
        norm: cached f32[] L2 norm without the factors.
        spare: ``norm``, and a copy of it for the next caller of ``l2_norm``.
        handle: the first ``OffloadedGradient`` of this gradient; each further one keeps it alive.
    """

    __slots__ = (
        "__weakref__", "_source", "_values", "clip", "contributions", "final", "handle", "like", "norm", "spare",
        "state", "unscale",
    )  # fmt: skip

    def __init__(
        self, like: GradientLike, source: weakref.ref[GradientSource], state: GradientState = GradientState.DISCARDED
    ) -> None:
        self.like = like
        self.state = state
        self.contributions = 0
        self.clip: Factor = 1.0
        self.unscale: Factor = 1.0
        self.final = UNSCALED
        self.norm: Tensor | None = None
        self.spare: tuple[Tensor, Tensor] | None = None
        self._source = source
        self._values: Tensor | None = None
        self.handle: weakref.ref[Tensor] | None = None

    def belongs_to(self, source: GradientSource) -> bool:
        return self._source() is source

    @property
    def first_tensor(self) -> Tensor | None:
        return None if self.handle is None else self.handle()

    # Reading.

    @property
    def factor(self) -> Factor:
        return product_of(self.clip, self.unscale)

    def read(self) -> Tensor:
        """The gradient as a dense tensor, which callers must not write: a dense gradient returns its own tensor.

        Raises RuntimeError if the values are gone.
        """
        if self.state is GradientState.DENSE:
            assert self._values is not None
            return self._values
        if self.state is GradientState.ZERO:
            values = torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.like.device)
        elif self.state.away:
            if (source := self._source()) is None:
                self.state = GradientState.DISCARDED
                self.refuse("read")
            values = source.values_of(self)
        else:
            self.refuse("read")
        factor = self.factor
        if not isinstance(factor, float) or factor != 1.0:
            multiply_(values, factor)
        return values

    def l2_norm(self, dtype: torch.dtype | None = None) -> Tensor:
        """0-d L2 norm, of ``dtype`` or the gradient's own, without making it dense.

        Raises RuntimeError if the values are gone and were overwritten, or the gradient was discarded.
        """
        dtype, state = dtype or self.like.dtype, self.state
        if state is GradientState.DENSE:
            values, source = self.read(), self._source()
            if source is not None:
                return source.norm_of_values(values).to(dtype)
            dense: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
            return dense
        if state is GradientState.ZERO:
            norm = torch.zeros((), device=self.like.device)
        elif state in (GradientState.SPOILED, GradientState.DISCARDED, GradientState.IN_BACKWARD):
            self.refuse("measure")
        else:
            source = self._source()
            found = None if source is None else source.norm_of(self)
            if found is None:
                self.refuse("measure")
            norm = found
        factor: Factor = self.factor
        if isinstance(factor, Tensor):
            norm = norm * factor.abs().to(norm.dtype)
        elif factor != 1.0:
            norm = norm * abs(factor)
        elif norm is self.norm:
            # The caller may write the result in place, which must not change the cached norm.
            spare, self.spare = self.spare, None
            norm = spare[1] if spare is not None and spare[0] is norm else norm.clone()
        return norm if norm.dtype == dtype else norm.to(dtype)

    # Writing.

    def make_dense(self) -> Tensor:
        """Move the gradient's values into a dense tensor, which holds them from now on, and return it.

        Raises RuntimeError if the values are gone.
        """
        if self.state is not GradientState.DENSE:
            self._take_memory(self.read())
        assert self._values is not None
        return self._values

    def replaced(self, values: Tensor) -> GradientRecord:
        """A dense gradient that replaces this one (``grad.data = values``), of the same shape."""
        if self.state is GradientState.IN_BACKWARD:
            self.refuse("write")
        record = self.moved(values)
        record._values, record.state = values, GradientState.DENSE
        return record

    def overwrite(self, write: Callable[[Tensor], object]) -> None:
        """Let ``write`` set every element; the old values are not read."""
        if self.state is GradientState.DENSE:
            write(self.make_dense())
            return
        values = torch.empty(self.like.shape, dtype=self.like.dtype, device=self.like.device)
        if self.state is GradientState.IN_BACKWARD:
            self.refuse("write")
        write(values)  # first: if it raises, the gradient stays as it was
        self._take_memory(values)

    def _take_memory(self, values: Tensor) -> None:
        self._set_dense(values)
        if (source := self._source()) is not None:
            source.became_dense()

    def moved(self, like: Tensor) -> GradientRecord:
        """A gradient in the same state, of the dtype and device of ``like``."""
        record = GradientRecord(self.like._replace(dtype=like.dtype, device=like.device), self._source)
        record.state = self.state
        return record

    def scale(self, by: float | Tensor, *, divide: bool = False, unscale: bool = False) -> None:
        """Multiply the gradient by one element in place, or divide it; ``unscale``: the factor undoes loss scaling."""
        if self.state is GradientState.IN_BACKWARD:
            self.refuse("scale")
        if self.state is GradientState.DENSE:
            values = self.make_dense()
            values.div_(by) if divide else values.mul_(by)
            return
        source = self._source()
        factors = Factors(self.like.device, deferred=False) if source is None else source.factors
        if unscale:
            self.unscale = factors.times(self.unscale, by, divide=divide)
        else:
            self.clip = factors.times(self.clip, by, divide=divide)

    def zero(self) -> None:
        if self.state is GradientState.IN_BACKWARD:
            return
        if self.state is GradientState.DENSE:
            self.make_dense().zero_()  # in place: users may have a view of it
            return
        # The state first: after an interrupt ``ShownGradient.look`` sees it, and drops the engine's parts.
        self.state, self.contributions, self.norm = GradientState.ZERO, 0, None
        self.clip = self.unscale = 1.0
        self._leave_engine()

    def accumulate(self, grad: Tensor) -> None:
        source = self._source()
        if source is not None:
            source.accumulate(self, grad)
        else:
            self.make_dense().add_(grad)

    def forget_factors(self) -> None:
        self.clip = self.unscale = 1.0

    # The engine's side.

    def list_memory(self, found: MemoryList) -> None:
        found.content(self.norm, *(self.spare or ()))
        found.content(*(each for each in (self.clip, self.unscale) if isinstance(each, Tensor)))
        found.numbers(self.final)

    def check_usable(self) -> None:
        """Raise RuntimeError if no optimizer step can use it: an earlier step has, or it was dropped."""
        if self.state.gone:
            self.refuse("use")

    def check_not_averaged(self) -> None:
        """Raise RuntimeError if the gradient is the mean over ranks already: a collective would use it."""
        if (source := self._source()) is not None and source.averaged:
            raise RuntimeError(
                f"a collective is called with the gradient of {self.like.name}, which is the mean over ranks already: "
                "the optimizer has a process_group. Leave the collective out, or pass process_group=False to average "
                "by hand"
            )

    def values_at_close(self, *, keep: bool) -> Tensor | None:
        """The tensor that stays in ``.grad`` at close; ``keep`` also moves values out of engine memory."""
        if self.state is GradientState.DENSE:
            return self.make_dense()
        if keep and not self.state.gone:
            with suppress(RuntimeError):  # a failed copy, which raises elsewhere
                return self.make_dense()
        return None

    def dropped(self, *, keep: bool) -> None:
        """Give up a gradient that left ``.grad`` before a step; ``keep``: it becomes dense if a tensor lives."""
        if self.state.away and keep and self.first_tensor is not None:
            with suppress(RuntimeError):  # a failed copy, which raises elsewhere
                self.make_dense()
        if self.state.away:
            self.state = GradientState.DISCARDED

    def refuse(self, verb: str) -> NoReturn:
        """Raise RuntimeError: the values are gone, which the caller was about to ``verb``."""
        if self.state is GradientState.SPOILED:
            reason = (
                "a backward added to it after step() had consumed it, and consumed gradients of offloaded parameters "
                "are not kept; call optimizer.zero_grad() after each step()"
            )
        elif self.state is GradientState.CONSUMED:
            reason = (
                "step() has consumed it, and the values of offloaded parameters' gradients are not kept; "
                f"{verb} it before step() (its L2 norm can be read until the next backward), and call "
                "optimizer.zero_grad() after each step()"
            )
        elif self.state is GradientState.IN_BACKWARD:
            reason = (
                "a model compiled without an optimizer object updates its parameters inside the backward, and no "
                "gradient is left behind it; to clip, pass max_grad_norm among the options of torch.compile, or "
                "create a ZenFlowAdamW and call its step()"
            )
        else:
            reason = f"it was discarded, or its optimizer was closed; {verb} it before that, or keep a clone()"
        raise RuntimeError(f"cannot {verb} the gradient of {self.like.name}: {reason}")

    def _leave_engine(self) -> None:
        if (source := self._source()) is not None:
            source.give_up(self)

    def _set_dense(self, values: Tensor) -> None:
        # No call in between: an interrupt finds both the values and the state that says where they are, or neither.
        self._values, self.state, self.norm = values, GradientState.DENSE, None
        self.clip = self.unscale = 1.0
        self._leave_engine()
