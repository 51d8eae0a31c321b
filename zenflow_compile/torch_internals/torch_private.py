"""Private PyTorch APIs that the runtime uses, seen in torch 2.11 and 2.13 where a function names no other versions.

``torch_private_compiler`` has those of Dynamo, AOTAutograd and Inductor that the backend uses.
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakMethod, ref

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import profiler as _profiler

_T = TypeVar("_T")
_P = ParamSpec("_P")


@contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """Run the calling thread's CPU operators on one core.

    ``torch.set_num_threads`` would also change the count of the training thread; OpenMP's own setting belongs to the
    calling thread. The library is found through libtorch's dependencies, so that it is the OpenMP runtime that PyTorch
    uses, whatever its name. Without OpenMP this does nothing.
    """
    openmp = _openmp()
    if openmp is None:
        yield
        return
    torch.get_num_threads()  # a thread's first operator sets its count, which must happen before ours
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.PyDLL | None:
    """PyTorch's OpenMP runtime. A PyDLL: a CDLL call releases the GIL and may wait 5 ms to get it back."""
    suffix = {"darwin": "dylib"}.get(sys.platform, "so")
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        library.omp_set_num_threads.restype = None
        library.omp_get_max_threads.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def inductor_option_names() -> frozenset[str]:
    """Names of Inductor's settings, such as ``"triton.cudagraphs"``."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's settings for every ``mode`` of ``torch.compile``."""
    from torch._inductor import list_mode_options

    return {mode: dict(settings) for mode, settings in list_mode_options().items()}


def cpp_compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler that Inductor would use; None if there is none.

    Inductor takes the variable CXX for the name of a program. With arguments, as in ``"ccache g++"``, it is split.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return (str(get_cpp_compiler()),)
    except InvalidCxxCompiler:
        with suppress(ValueError):  # a quotation that does not end
            words = tuple(shlex.split(os.environ.get("CXX", "")))
            return words if words and shutil.which(words[0]) else None
        return None


def extension_flags() -> tuple[str, ...]:
    """Flags for the compiler of C++ that includes headers of c10."""
    folder = Path(torch.__file__).parent
    return (
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10"),  # that libc10 is loaded already
    )


def fused_adamw_multi_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """One AdamW step for a list of parameters of one dtype, in place."""
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
    )  # fmt: skip


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that runs in this thread; -1 outside of a backward."""


queue_backward_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Run a callback at the end of the current backward. Must be called while a backward runs. FSDP2 uses the same hook."""


def inside_compiled_autograd() -> bool:
    """Whether compiled autograd captured the running backward; it calls no callback at its end.

    FSDP2 makes the same check.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def inside_backward_node() -> bool:
    """Whether a node of a backward is being evaluated in this thread.

    True in the end callback of a backward that runs inside a node of another one: reentrant checkpointing.
    """
    return torch._C._current_autograd_node() is not None


profiler_active: Callable[[], bool] = partial(getattr, _profiler, "_is_profiler_enabled")
"""Whether ``torch.profiler`` or ``emit_nvtx`` records in some thread of this process.

``torch.autograd._profiler_enabled`` tells less: it is False in threads that started before the profiler did. A partial,
because it is called for every parameter, and costs a third of a function."""


def optimizer_hooks(optimizer: torch.optim.Optimizer, kind: str) -> list[Callable[..., Any]]:
    """Hooks that users registered: ``kind`` is "state_dict_pre", "state_dict_post", "load_state_dict_pre" or
    "load_state_dict_post"."""
    return list(getattr(optimizer, f"_optimizer_{kind}_hooks").values())


class Asked(enum.Enum):
    """What autograd does with the gradient of a parameter in the running backward."""

    ACCUMULATE = enum.auto()
    """It is accumulated into ``.grad``."""
    CAPTURE = enum.auto()
    """It is returned: ``torch.autograd.grad(loss, param)``."""
    NO = enum.auto()
    """It is dropped: ``torch.autograd.grad(loss, x)``, ``loss.backward(inputs=[x])``."""


def accumulate_grad_node(param: Tensor) -> Any:
    """The autograd node that accumulates into ``param.grad``; None if the parameter requires no gradient.

    Hazard: Python cannot see prehooks on this node. They get None in the place of an offloaded gradient.
    """
    return torch.autograd.graph.get_gradient_edge(param).node if param.requires_grad else None


def asked_for(accumulate_grad: Any) -> Asked:
    """What the running backward does with the gradient of an ``AccumulateGrad`` node."""
    try:
        return Asked.ACCUMULATE if torch._C._will_engine_execute_node(accumulate_grad) else Asked.NO
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return Asked.CAPTURE  # the node is a leaf whose gradient is captured


def accumulates_all(accumulate_grads: Sequence[Any]) -> bool:
    """Whether the running backward accumulates the gradients of all these nodes; ``asked_for`` tells them apart.

    One call for many nodes: each costs a tenth of ``asked_for``.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, accumulate_grads))
    except RuntimeError:
        return False


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a wrapper of other tensors, such as a ``DTensor``."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def is_flattened_by_fsdp(tensor: Tensor) -> bool:
    """Whether ``FullyShardedDataParallel`` keeps ``tensor`` in its flat memory. Seen in torch 2.13."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(sharded: Any) -> Tensor:
    """The part of a ``DTensor`` that this rank has, itself: ``to_local()`` makes another tensor while autograd records.
    FSDP2 reads the same attribute."""
    return cast(Tensor, sharded._local_tensor)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group, ascending."""
    return tuple(sorted(torch.distributed.get_process_group_ranks(group)))


def is_shard(placement: Any) -> bool:
    """Whether a placement is in chunks, also if it is a dimension's of FSDP2 that tensor parallelism shards, too."""
    return type(placement).__name__ in ("Shard", "_StridedShard")


def sharded_as(like: Any, local: Tensor) -> Tensor:
    """A ``DTensor`` with the mesh, placements and shape of ``like`` over ``local``.

    FSDP2 makes gradients so; ``DTensor.from_local`` would make a view of ``local``.
    """
    from torch.distributed.tensor import DTensor

    return cast(Tensor, DTensor(local, like._spec, requires_grad=False))  # type: ignore[no-untyped-call]


def sharded_along(like: Any, local: Tensor, shape: tuple[int, ...], dims: Sequence[int | None], last: int) -> Tensor:
    """A ``DTensor`` of ``shape`` over ``local``, sharded over the mesh of ``like``.

    Args:
        dims: the dimension of ``shape`` that each dimension of the mesh shards; None: it replicates.
        last: the dimension of the mesh that shards what the others have sharded before, as that of FSDP2 does.

    ``local`` may be on the host also where the mesh is of devices; ``DTensor.from_local`` would move it there, and
    ``torch.distributed.checkpoint`` takes both.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Any] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    sizes = (like.device_mesh.size(place) for place, dim in enumerate(dims) if place != last and dim == dims[last])
    if (dim := dims[last]) is not None and (pieces := math.prod(sizes)) > 1:
        placements[last] = _StridedShard(dim, split_factor=pieces)
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, tuple(placements), TensorMeta(torch.Size(shape), stride, local.dtype))
    return cast(Tensor, DTensor(local, spec, requires_grad=False))  # type: ignore[no-untyped-call]


def _fully_sharded_groups() -> Iterator[Any]:
    """The groups of parameters that ``fully_shard`` gathers together, of all models."""
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def fully_sharded_params() -> Iterator[Tensor]:
    """The parameters that ``fully_shard`` manages, of all models, also while modules hold gathered ones instead."""
    for group in _fully_sharded_groups():
        yield from (each.sharded_param for each in group.fsdp_params)


def modules_with_shards(params: Sequence[Tensor]) -> list[nn.Module]:
    """The modules that hold ``params``, which ``fully_shard`` manages."""
    wanted = {id(param) for param in params}
    infos = [each._module_info for group in _fully_sharded_groups() for each in group.fsdp_params
             if id(each.sharded_param) in wanted]  # fmt: skip
    held = [module for info in infos for module in (info.module, *info.shared_modules)]
    return list({id(module): module for module in held}.values())


class _Around:
    """A method, or another callable attribute, of an object, inside of contexts."""

    def __init__(self, call: Callable[..., Any], owner: Any) -> None:
        self.call, self._owner = call, owner
        self.contexts: list[_Context] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for number, context in enumerate(self.contexts):
                if context not in self.contexts[:number]:
                    stack.enter_context(context(self._owner, *args, **kwargs))
            return self.call(*args, **kwargs)

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        """Of collectives of FSDP2's, which are objects."""
        return self.call.allocate(*args, **kwargs)  # type: ignore[attr-defined]


_Context = Callable[..., AbstractContextManager[object]]


def _add_around(owner: Any, name: str, context: _Context) -> Callable[[], None]:
    """Run ``owner.name`` inside of ``context(owner, *arguments)``, in which equal contexts are one.

    Returns a call that ends it, keeps no owner alive, and may be called in any order with those of others.
    """
    around = getattr(owner, name)
    if not isinstance(around, _Around):
        around = _Around(around, owner)
        setattr(owner, name, around)
    around.contexts.append(context)
    reference = ref(owner)

    def end() -> None:
        around = getattr(reference(), name, None)
        if isinstance(around, _Around) and context in around.contexts:
            around.contexts.remove(context)
            if not around.contexts:
                _put_back(reference(), name, around.call)

    return end


def _put_back(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Set an attribute that was replaced; a method of its class is no attribute of its own."""
    if getattr(call, "__self__", None) is owner:
        del owner.__dict__[name]
    else:
        setattr(owner, name, call)


@dataclass(frozen=True, slots=True)
class _CalledFirst:
    """Calls a listener in the stream that reads the shards of a group, which are unsharded inside of the context."""

    listener: Callable[[Sequence[Tensor]], None]

    def __call__(self, group: Any, async_op: bool = False) -> AbstractContextManager[object]:
        with self._stream(group, async_op):
            self.listener([each.sharded_param for each in group.fsdp_params])
        return nullcontext()

    def _stream(self, group: Any, async_op: bool) -> AbstractContextManager[object]:
        """The stream that copies the shards into what is sent."""
        # Before the first forward, or in a group of one rank, whose gathered parameters are copies made in this stream.
        if not hasattr(group.comm_ctx, "all_gather_copy_in_stream") or group._all_gather_process_group.size() == 1:
            return nullcontext()
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        return cast("AbstractContextManager[object]", group.device_handle.stream(stream))


class UnshardHandle:
    """Ends the calls of one listener."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def remove(self) -> None:
        """Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()


def names_of_shards() -> dict[int, str]:
    """Names of sharded parameters in their models, by ``id``: of those whose models have run a forward."""
    params = [param for group in _fully_sharded_groups() for param in group.fsdp_params]
    return {id(param.sharded_param): param._param_fqn for param in params if param._param_fqn is not None}


def listen_to_unshard(params: Sequence[Tensor], listener: Callable[[Sequence[Tensor]], None]) -> list[UnshardHandle]:
    """Have FSDP2 call ``listener(sharded_params)`` before it reads the shards of a group that has one of ``params``.

    On a device with streams the call is in the stream that reads them. Equal listeners (``==``) of a group are one.
    """
    groups = _fully_sharded_groups_of(params)
    return [UnshardHandle(_add_around(group, "unshard", _CalledFirst(listener))) for group in groups]


def _fully_sharded_groups_of(params: Sequence[Tensor]) -> Iterator[Any]:
    wanted = {id(param) for param in params}
    for group in _fully_sharded_groups():
        if not wanted.isdisjoint(id(each.sharded_param) for each in group.fsdp_params):
            yield group


@dataclass(frozen=True, slots=True)
class _NamedFailures:
    """Has ``refuse(what, error)`` raise for collectives of PyTorch's that fail inside of the context."""

    what: str
    refuse: WeakMethod[Any]

    @contextmanager
    def __call__(self, group: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if _is_of_collective(error) and (refuse := self.refuse()) is not None:
                refuse(self.what, error)
            raise


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether PyTorch's collectives have raised it: gloo raises mere RuntimeErrors, in the frame that waits for one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else trace.tb_frame.f_code.co_filename
    return isinstance(error, torch.distributed.DistError) or where.endswith(
        ("distributed_c10d.py", "_fsdp_collectives.py")
    )


@dataclass(frozen=True, slots=True)
class _NotedReductions:
    """Tells ``note`` of which parameters of group ``number`` gradients are averaged."""

    number: int
    note: WeakMethod[Any]

    def __call__(self, group: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[object]:
        note = self.note()
        if note is not None and group.reduce_grads and not getattr(group, "reduce_scatter_unused_params", False):
            used = "".join("g" if _has_gradient(param) else "-" for param in group.fsdp_params)
            if "g" in used:
                note(self.number, used)
        return nullcontext()


def _has_gradient(fsdp_param: Any) -> bool:
    if not hasattr(fsdp_param, "_unsharded_param"):
        return False
    return fsdp_param.unsharded_accumulated_grad is not None or fsdp_param.unsharded_param.grad is not None


_COLLECTIVES = {
    "unshard": "gathered weights",
    "wait_for_unshard": "waited for weights",
    "post_backward": "averaged gradients",
}
"""Methods of FSDP2's groups that send something, and what they do."""


def _members_of(group: Any) -> tuple[int, ...] | None:
    """The ranks that shard the parameters of a group; None if it is replicated, or its process group was destroyed."""
    shards = getattr(group.mesh_info, "shard_process_group", None)
    with suppress(KeyError, ValueError):
        return None if shards is None else ranks_of(shards)
    return None


class ShardedGroups:
    """FSDP2's groups of the parameters of an optimizer.

    Args:
        params: of the optimizer.
        members: the ranks of each process group that shards some of them. In any model's group that has one of these,
            a collective that fails has ``refuse(what, error)`` called, which raises instead.
        refuse: see ``members``.
        note: called as ``note(number, used)`` before gradients are averaged, those of which parameters of group
            ``number`` by a letter for each. The numbers are the same on all ranks.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        members: Collection[tuple[int, ...]],
        refuse: WeakMethod[Any],
        note: WeakMethod[Any],
    ) -> None:
        self._ends: list[Callable[[], None]] = []
        for group in _fully_sharded_groups() if members else ():
            if _members_of(group) in members:
                for name, what in _COLLECTIVES.items():
                    self._ends.append(_add_around(group, name, _NamedFailures(what, refuse)))
        groups = list(_fully_sharded_groups_of(params)) if members else []
        self._ends += [
            _add_around(group, "post_backward", _NotedReductions(number, note)) for number, group in enumerate(groups)
        ]
        self._groups = list(map(ref, groups))

    def name(self, number: int, place: int) -> str:
        """The name of a parameter in its model."""
        group = self._groups[number]()
        return "a parameter" if group is None else group.fsdp_params[place]._param_fqn or "a parameter"

    def end(self) -> None:
        """Leave the groups alone. Idempotent."""
        ends, self._ends = self._ends, []
        for end in ends:
            end()


@dataclass(frozen=True, slots=True)
class _Watched:
    """``context(kind, bytes_sent)`` around a collective."""

    kind: str
    context: Callable[[str, int], AbstractContextManager[None]]

    def __call__(
        self, fsdp_group: Any, /, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[object]:
        return self.context(self.kind, input_tensor.nbytes)


def watch_collectives(
    params: Sequence[Tensor], context: Callable[[str, int], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Run the collectives of FSDP2's groups that have one of ``params`` inside of ``context(kind, bytes_sent)``.

    On a device with streams the context is in the stream of the collective. The all-reduce over replicas of a hybrid
    mesh is none of them. Returns a call that ends it.
    """
    ends = [
        _add_around(group, name, _Watched(kind, context))
        for group in _fully_sharded_groups_of(params)
        for name, kind in (("_all_gather_comm", "all_gather"), ("_reduce_scatter_comm", "reduce_scatter"))
    ]

    def end() -> None:
        for each in ends:
            each()
        ends.clear()

    return end


def adds_to_sharded_grad() -> bool:
    """Whether FSDP2, which calls a hook on ``.grad``, has added the gradient to a tensor that was there.

    Its function tells by a local variable.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "foreach_reduce":
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("to_accumulate_grad"))


refuse_data_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Make C++ code raise ``RuntimeError`` if it asks for the address of a tensor without memory, as for fake ones."""


def _references(param: Tensor) -> tuple[int, int, int]:
    """Counts of references to ``param.grad``: from Python, to the tensor, to its storage. Includes this function's."""
    grad: Any = param.grad
    return sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata)


@cache
def _references_of_parameter() -> tuple[int, int, int]:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    return _references(param)


def only_parameter_holds_grad(param: Tensor) -> bool:
    """Whether nothing but ``param`` refers to the tensor in ``param.grad``, or to its memory.

    False, for example, for views of a flat gradient buffer and for gradients with an autograd graph
    (``create_graph=True``). ``Tensor._use_count`` and ``_storage_Use_Count`` seen in torch 2.11 and 2.13.
    """
    grad_requires_grad = param.grad is not None and param.grad.requires_grad
    return not grad_requires_grad and _references(param) == _references_of_parameter()


def describes_for_tracing() -> bool:
    """Whether the caller's caller describes tensors to make fake ones: it reads a storage's size and no values.

    Dynamo describes ``.grad`` together with its parameter.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def skipped_by_dynamo(function: Callable[_P, _T], *, with_callees: bool = True) -> Callable[_P, _T]:
    """Keep Dynamo from compiling ``function``, and all functions that it calls, where eager code or C++ calls it.

    Unlike ``outside_of_graphs`` this costs nothing per call. Calls that Dynamo traces are not affected.
    Without ``with_callees``, the functions that it calls are still compiled.
    """
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def outside_of_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make Dynamo call ``function`` instead of tracing it, without importing Dynamo now.

    PyTorch decorates methods of its optimizers in the same way.
    """
    return cast("Callable[_P, _T]", torch._disable_dynamo(function))  # type: ignore[attr-defined]


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Run operators as in plain eager code, also while the caller is transformed or traced.

    Suspends functorch's transforms, dispatch modes (``make_fx``, non-strict ``torch.export``), function modes (export
    records changes of the grad mode with one), ``torch.jit.trace``, gradients, and inference mode, whose tensors could
    not be written later.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


class Refusal(NamedTuple):
    """Why PyTorch raises if code asks for the address of a storage.

    Attributes:
        nbytes: size of the storage before.
        text: of the error, encoded. The object also tells one refusal from another.
    """

    nbytes: int
    text: bytes


REFUSAL = "_refusal"
"""Name of the attribute in which the Python object of a storage has its ``Refusal``. That object lives as long as the
storage."""


def refusal_of(storage: torch.UntypedStorage) -> Refusal | None:
    """Why PyTorch raises if code asks for the address of ``storage``; None: it does not."""
    return cast("Refusal | None", storage.__dict__.get(REFUSAL))


def address(tensor: Tensor) -> int:
    """The address of a tensor's first element; 0 if reads of it are refused."""
    return 0 if refusal_of(tensor.untyped_storage()) is not None else tensor.data_ptr()


same_storage: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Whether two tensors have one storage."""


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors begin at the same place of one storage, whose address may be refused."""
    return same_storage(one, other) and one.storage_offset() == other.storage_offset()


class MemoryMark:
    """Recognizes the memory of a tensor without keeping it alive, or reading its address, which may be refused.

    An address is not enough: freed memory is soon reused for another tensor. A weak reference to the storage keeps its
    identity from being reused.

    Attributes:
        offset: of the tensor's first element in the storage, in elements.
        storage: its ``storage_identity``.
    """

    __slots__ = ("_storage", "offset", "storage")

    def __init__(self, tensor: Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self.offset = tensor.storage_offset()
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.storage: int = self._storage.cdata

    def matches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` begins at the same place of the same storage."""
        return storage_identity(tensor.untyped_storage()) == self.storage and tensor.storage_offset() == self.offset


def saves_tensors_elsewhere() -> bool:
    """Whether code has asked autograd to call it with every tensor that is saved for a backward.

    ``torch.autograd.graph.saved_tensors_hooks`` and ``save_on_cpu`` do. Seen in torch 2.13.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""What tells a storage from all others that live at the same time."""


_own_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
"""A tensor's version, also of a subclass that shows another one."""


def version_counter_labels(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor, equal for two tensors if and only if they share a version counter.

    It sets every tensor's version to its position: tensors that share a counter then read the same version. It restores
    the versions. Tensors of inference mode have no counter.
    """
    labels = list(range(len(tensors)))
    counted = [index for index in labels if not tensors[index].is_inference()]
    having = tuple(tensors[index] for index in counted)
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(having):
        torch._C._autograd._unsafe_set_version_counter(having, tuple(counted))
        for index in counted:
            labels[index] = _own_version(tensors[index])
    return labels


def shared_store(prefix: str) -> torch._C._distributed_c10d.Store:
    """The key-value store that the processes of a run share, for keys of one prefix."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def store_values(store: torch._C._distributed_c10d.Store, keys: list[str]) -> list[bytes]:
    """The values of ``keys``, which are all there; from one message where the kind of store can."""
    if cast(Any, store).has_extended_api():
        return [bytes(value) for value in store.multi_get(keys)]
    return [store.get(key) for key in keys]


def group_timeout(group: torch.distributed.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of ``group`` waits for the other ranks."""
    return group._get_backend(device).options._timeout


def start_reduce_scatter(out: Tensor, packed: Tensor, group: torch.distributed.ProcessGroup) -> torch.distributed.Work:
    """Start the mean of ``packed`` over ranks, of which ``out`` takes this rank's part.

    Torch 2.13 has a new name for it, and a warning under the old one.
    """
    start = getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)
    return cast(
        torch.distributed.Work, start(out, packed, op=torch.distributed.ReduceOp.AVG, group=group, async_op=True)
    )


def start_all_gather(out: Tensor, block: Tensor, group: torch.distributed.ProcessGroup) -> torch.distributed.Work:
    """Start to gather ``block`` of each rank in ``out``. Torch 2.13 has a new name for it, see above."""
    start = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
    return cast(torch.distributed.Work, start(out, block, group=group, async_op=True))
