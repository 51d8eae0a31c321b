"""The tensor in ``.grad`` of a parameter whose gradient is not on the device as a whole, and how the engine reads it.

What clipping, loss scaling, accumulation and ``zero_grad`` ask of a gradient is answered from what the engine knows of
it. Every other operator gets a dense tensor: a temporary one if it only reads, the gradient's own from then on if it
writes, or returns a view, or if its schema does not say.

[Note: .grad is the truth] The engine's gradient is the one whose ``OffloadedGradient`` is in ``.grad``. Clearing or
replacing ``.grad`` changes what the next step uses, as with any optimizer. The engine looks where a gradient arrives
and at the optimizer step, and nowhere else: ``look``. With the optimizer in backward, ``.grad`` stays None.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zenflow_compile.runtime.gradients.gradient_record import (
    GradientRecord,
    GradientState,
)
from zenflow_compile.torch_internals import torch_private

aten = torch.ops.aten

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of operators that several ranks run together."""

_Handler = Callable[[Sequence[Any], dict[str, Any]], Any]


class OffloadedGradient(Tensor):
    """A tensor of the parameter's shape, dtype and device, without memory of its own.

    It behaves as the dense gradient would. Its values are gone once an optimizer step has consumed them: reading them
    raises ``RuntimeError`` and names the parameter.
    """

    _record: GradientRecord
    _first: Tensor

    # Methods of Tensor reach C++ directly. Operators still arrive in __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(record: GradientRecord) -> OffloadedGradient:
        like = record.like
        tensor: OffloadedGradient = Tensor._make_wrapper_subclass(
            OffloadedGradient, like.shape, dtype=like.dtype, device=like.device
        )
        torch_private.refuse_data_pointer(tensor)
        tensor._record = record
        if (handle := record.handle) is not None and (first := handle()) is not None:
            tensor._first = first  # keeps the first tensor alive, so that the record needs one weak reference
        else:
            record.handle = weakref.ref(tensor)
        return tensor

    @classmethod
    @torch_private.skipped_by_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # Tensors of inference mode could not be written after it, and a dense gradient outlives it.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_dense(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values, as a dense gradient shows them; of one whose values are gone, its state."""
        record = self._record
        if not record.state.gone:
            return repr(record.read())
        return f"OffloadedGradient({record.like.name}, {list(self.shape)}, {record.state.name.lower()})"

    # What reaches memory without an operator. It can be written through what these return, but for ``tolist``.

    def numpy(self, *, force: bool = False) -> Any:
        return self._record.make_dense().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._record.make_dense().__array__(dtype)  # type: ignore[no-untyped-call]

    def apply_(self, function: Callable[[Any], Any]) -> OffloadedGradient:
        self._record.make_dense().apply_(function)
        return self

    def tolist(self) -> Any:
        return self._record.read().tolist()

    def data_ptr(self) -> int:
        return self._record.make_dense().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        if torch_private.describes_for_tracing():
            # A graph that is captured asks what ``.grad`` of its parameters looks like, and reads no values.
            size = self.numel() * self.element_size()
            return torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
        return self._record.make_dense().untyped_storage()

    def storage(self) -> Any:
        return self._record.make_dense().storage()  # type: ignore[no-untyped-call]

    def share_memory_(self) -> OffloadedGradient:
        if not self._record.state.gone:  # ``module.share_memory()`` after a step
            self._record.make_dense().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        dense = self._record.state is GradientState.DENSE
        return dense and self._record.make_dense().is_shared()  # type: ignore[no-untyped-call]

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._record.make_dense().__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __copy__(self) -> Tensor:
        return self.detach()  # a shallow copy shares memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self._record.read().clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._record.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"the data of the gradient of {self._record.like.name} must have its shape {list(self.shape)}, not "
                f"{list(values.shape)}; assign such a tensor to .grad instead"
            )
        if isinstance(values, OffloadedGradient):
            self._record = values._record
        else:
            # A record of this tensor's own: others of the same gradient keep their values, as in PyTorch.
            self._record = self._record.replaced(values.detach())
        if values.dtype != self.dtype or values.device != self.device:
            # ``module.to()``: the parameter has this dtype and device already.
            Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


# Operators on dense values.


def _on_dense(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func.namespace in _COLLECTIVES:
        tree_map_only(OffloadedGradient, lambda gradient: gradient._record.check_not_averaged(), (args, kwargs))

    def dense(value: Any, *, aliased: bool) -> Any:
        def values(gradient: OffloadedGradient) -> Tensor:
            return gradient._record.make_dense() if aliased else gradient._record.read()

        return tree_map_only(OffloadedGradient, values, value)

    aliased = _aliased_arguments(func)
    dense_args = [dense(value, aliased=aliased is None or number in aliased) for number, value in enumerate(args)]
    dense_kwargs = {name: dense(value, aliased=aliased is None or name in aliased) for name, value in kwargs.items()}
    result = func(*dense_args, **dense_kwargs)
    # An operator in place returns what it was called with, so that ``p.grad *= 2`` leaves ``p.grad`` the same object.
    if args and isinstance(args[0], OffloadedGradient) and result is dense_args[0] and _in_place(func):
        return args[0]
    return result


@cache
def _aliased_arguments(func: Any) -> frozenset[int | str] | None:
    """The arguments that an operator may write, or return a view of, by position and name; None: any of them.

    Only PyTorch's own schemas tell. Collectives, for example, do not, and write after they have returned.
    """
    if func.namespace not in ("aten", "prims"):
        return None
    arguments = enumerate(func._schema.arguments)
    return frozenset(key for number, each in arguments if each.alias_info is not None for key in (number, each.name))


@cache
def _in_place(func: Any) -> bool:
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and bool(first.is_write)


# Operators that are answered.


def _overwrite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Overwrite every element in place; the old values are not read."""
    gradient, *others = args
    if not isinstance(gradient, OffloadedGradient) or any(isinstance(each, OffloadedGradient) for each in others):
        return NotImplemented
    gradient._record.overwrite(lambda values: func(values, *others, **kwargs))
    return gradient


def _make_like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A new tensor, for which a shape, a dtype and a device are enough."""
    like = args[0]._record.like
    return func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs)


def _to(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``module.to()`` moves ``.grad``, too, and values that are gone stay gone."""
    gradient = args[0]
    if not gradient._record.state.gone:
        return NotImplemented
    moved = aten._to_copy.default(torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device), **kwargs)
    return OffloadedGradient.of(gradient._record.moved(moved))


def _detach(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return OffloadedGradient.of(args[0]._record)


def _view(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view of the same shape, which ``DTensor.to_local`` makes."""
    gradient, size = args
    return NotImplemented if tuple(size) != tuple(gradient.shape) else OffloadedGradient.of(gradient._record)


def _zero(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    args[0]._record.zero()
    return args[0]


def _zero_all(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    deferred = [each for each in args[0] if not isinstance(each, OffloadedGradient)]
    for each in args[0]:
        if isinstance(each, OffloadedGradient):
            each._record.zero()
    if deferred:
        torch._foreach_zero_(deferred)


def _scales(value: Any) -> bool:
    """Whether multiplying by ``value`` is scaling by one real number."""
    if isinstance(value, Tensor):
        # One element in more dimensions than the gradient has would change its shape: PyTorch says so.
        return value.dim() <= 1 and value.numel() == 1 and not value.is_complex() and type(value) is Tensor
    return isinstance(value, (int, float))


def _scale(args: Sequence[Any], kwargs: dict[str, Any], *, divide: bool) -> Any:
    gradient, by = args
    if not isinstance(gradient, OffloadedGradient) or not _scales(by) or kwargs:
        return NotImplemented
    gradient._record.scale(by, divide=divide)
    return gradient


def _scale_all(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, divide: bool) -> Any:
    gradients, by = args
    each_by = list(by) if isinstance(by, (list, tuple)) else [by] * len(gradients)
    if kwargs or len(each_by) != len(gradients) or not all(_scales(value) for value in each_by):
        return NotImplemented
    deferred = []
    for gradient, value in zip(gradients, each_by, strict=True):
        if isinstance(gradient, OffloadedGradient):
            gradient._record.scale(value, divide=divide)
        else:
            deferred.append((gradient, value))
    if deferred:
        func([each for each, _ in deferred], [v for _, v in deferred] if isinstance(by, (list, tuple)) else by)
    return None


def _with_defaults(args: Sequence[Any], defaults: tuple[Any, ...]) -> list[Any]:
    return [*args, *defaults[len(args) :]]


def _is_l2(order: Any) -> bool:
    return isinstance(order, (int, float)) and float(order) == 2.0


def _vector_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not kwargs and (len(args) == 1 or (len(args) == 2 and args[1] == 2.0)):
        return args[0]._record.l2_norm()  # as clipping asks; PyTorch leaves out what has its default
    gradient, order, dim, keepdim = _with_defaults(args, (None, 2, None, False))
    if dim or keepdim or kwargs.keys() - {"dtype"} or not _is_l2(order):
        return NotImplemented
    return gradient._record.l2_norm(kwargs.get("dtype"))


def _norms(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradients, order, dtype = _with_defaults(args, (None, 2, None))
    order, dtype = kwargs.get("ord", order), kwargs.get("dtype", dtype)
    if not _is_l2(order):
        return NotImplemented
    deferred = [each for each in gradients if not isinstance(each, OffloadedGradient)]
    others = iter(torch._foreach_norm(deferred, order, dtype=dtype) if deferred else ())
    return [each._record.l2_norm(dtype) if isinstance(each, OffloadedGradient) else next(others) for each in gradients]


def _unscale(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``GradScaler.unscale_``: a gradient has an inf or NaN if its norm is none.

    A norm can overflow where no element does, with elements above 1e19: such a step is skipped, too.
    """
    gradients, found_inf, inv_scale = args
    records = [each._record for each in gradients if isinstance(each, OffloadedGradient)]
    without_memory = [record for record in records if record.state is not GradientState.DENSE]
    if without_memory:
        norms = torch.stack([record.l2_norm(torch.float32) for record in without_memory])
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norms)).any().to(found_inf)))
        for record in without_memory:
            record.scale(inv_scale, unscale=True)
    dense = [record.make_dense() for record in records if record.state is GradientState.DENSE]
    dense += [each for each in gradients if not isinstance(each, OffloadedGradient)]
    if dense:
        torch._amp_foreach_non_finite_check_and_unscale_(dense, found_inf, inv_scale)


def _add(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Autograd's accumulation into ``.grad``. An addition outside of a backward makes the gradient dense."""
    gradient, other = args
    if kwargs or not isinstance(gradient, OffloadedGradient) or torch_private.current_graph_task() == -1:
        return NotImplemented
    if isinstance(other, OffloadedGradient) or not isinstance(other, Tensor) or other.shape != gradient.shape:
        return NotImplemented
    if other.dtype != gradient.dtype or other.device != gradient.device:
        return NotImplemented  # autograd casts what it accumulates; this is a hook's
    gradient._record.accumulate(other)
    return gradient


def _refuse_resize(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = args[0]._record.like.name if isinstance(args[0], OffloadedGradient) else "an offloaded parameter"
    raise RuntimeError(f"the gradient of {name} cannot be resized or given other memory; assign a new tensor to .grad")


_NUMBERS = ("Scalar", "ScalarList", "Tensor")  # overloads of operators on many gradients

_HANDLERS: dict[Any, _Handler] = {
    aten.detach.default: _detach,
    aten.view.default: _view,
    aten.alias.default: _detach,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _zero_all,
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar), partial(_scale, divide=False)),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar), partial(_scale, divide=True)),
    **{getattr(aten._foreach_mul_, name): partial(_scale_all, torch._foreach_mul_, divide=False) for name in _NUMBERS},
    **{getattr(aten._foreach_div_, name): partial(_scale_all, torch._foreach_div_, divide=True) for name in _NUMBERS},
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _norms,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.add_.Tensor: _add,
    **{func: partial(_overwrite, func) for func in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor)},
    aten._to_copy.default: _to,
    aten.resize_.default: _refuse_resize,
    aten.set_.source_Tensor: _refuse_resize,
    aten.set_.source_Storage: _refuse_resize,
    aten.set_.source_Storage_storage_offset: _refuse_resize,
    **{
        func: partial(_make_like, func)
        for func in (
            aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
            aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
            aten.new_ones.default, aten.new_full.default,
        )
    },
}  # fmt: skip
