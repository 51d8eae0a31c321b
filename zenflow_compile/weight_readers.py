"""Functions of other packages that read or write parameters without calling a module, and what runs around them.

With a compiled model, an update becomes visible in front of the weight's next use in a graph. An average or a merge
that reads parameters directly comes before that use. Each function of ``FUNCTIONS`` is therefore replaced by one that
makes the due updates of every live optimizer visible and then calls it. An optimizer that has failed raises its
error, unless the function is given tensors, and none of them is in the memory of its parameters.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.import_hook import ImportHook
from zenflow_compile.runtime import ops
from zenflow_compile.runtime.engine import Engine
from zenflow_compile.runtime.forked_engine import ForkedEngine
from zenflow_compile.torch_internals import torch_private

Written: TypeAlias = Callable[[dict[str, Any]], Iterable[Tensor]]
"""Given the arguments of a call by name, returns the parameters that it writes in place through ``.data``."""


def _given_parameters(arguments: dict[str, Any]) -> list[Tensor]:
    # The function reads them afterwards, and they may come from a generator.
    params = arguments["parameters"] = list(arguments["parameters"])
    return params


def _of_module(arguments: dict[str, Any]) -> Iterable[Tensor]:
    module: nn.Module = arguments["pl_module"]
    return module.parameters()


def _of_base_layers(arguments: dict[str, Any]) -> list[Tensor]:
    """The weights into which PEFT merges adapters."""
    model: nn.Module = arguments["self"].model
    return [param for name, param in model.named_parameters() if ".base_layer." in f".{name}"]


def _of_lightning(package: str) -> dict[str, dict[str, Written | None]]:
    return {
        f"{package}.callbacks.weight_averaging": {
            # A second swap restores the weights before training continues, so the state still belongs to them.
            "WeightAveraging._swap_models": None,
            "WeightAveraging._copy_average_to_current": _of_module,
        },
        f"{package}.callbacks.stochastic_weight_avg": {
            "StochasticWeightAveraging.transfer_weights": None,
            "StochasticWeightAveraging.update_parameters": None,
        },
    }


FUNCTIONS: Mapping[str, Mapping[str, Written | None]] = {
    "torch.nn.utils.convert_parameters": {"parameters_to_vector": None, "vector_to_parameters": None},
    "torch.optim.swa_utils": {"AveragedModel.update_parameters": None},
    "diffusers.training_utils": {
        "EMAModel.__init__": None,
        "EMAModel.step": None,
        "EMAModel.store": None,
        "EMAModel.copy_to": _given_parameters,
        "EMAModel.restore": _given_parameters,
    },
    "peft.tuners.tuners_utils": {
        "BaseTuner.merge_adapter": _of_base_layers,
        "BaseTuner.unmerge_adapter": _of_base_layers,
        "BaseTuner.merge_and_unload": _of_base_layers,
    },
    "stable_baselines3.common.utils": {"polyak_update": None},
    "timm.utils.model_ema": {"ModelEmaV3.update": None},
    "trl.generation.vllm_client": {"VLLMClient.update_model_params": None},
    "trl.generation.vllm_generation": {"VLLMGeneration._iter_named_params": None},
    "trl.trainer.callbacks": {"SyncRefModelCallback.sync_target_model": None},
    **_of_lightning("lightning.pytorch"),
    **_of_lightning("pytorch_lightning"),
}
"""By module and qualified name; None: the function writes no parameter, or its writes are noticed anyway: they move the
version, or replace the memory."""


def adapt_known_readers() -> None:
    """Replace the functions of ``FUNCTIONS`` in modules that are imported, and in others when they are imported.

    Idempotent, and cheap from the second call on. Without a live optimizer the functions run as before.
    """
    hook.install()


def adapt(module: ModuleType) -> None:
    """Replace the functions of ``module``. Warns of those that it does not have."""
    functions = FUNCTIONS[module.__name__]
    missing = [name for name, written in functions.items() if not _replace(module, name, written)]
    if missing:
        package = module.__name__.partition(".")[0]
        names = ", ".join(f"{module.__name__}.{name}" for name in missing)
        release = ""
        with suppress(PackageNotFoundError):  # imported from a folder, not installed
            release = f" {version(package)}"
        warnings.warn(
            f"{package}{release} has no {names}, before which this version of zenflow-compile makes due "
            "updates visible: call optimizer.synchronize() before the code that took its place reads parameters",
            stacklevel=user_stacklevel(),
        )


hook = ImportHook(dict.fromkeys(FUNCTIONS, adapt))


def _replace(module: ModuleType, qualified_name: str, written: Written | None) -> bool:
    """Replace one function by ``_updates_first``. Returns False if the module does not have it."""
    owner_name, _, name = qualified_name.rpartition(".")
    owner = getattr(module, owner_name, None) if owner_name else module
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        return False
    if isinstance(found, (staticmethod, classmethod)):
        setattr(owner, name, type(found)(_updates_first(found.__func__, written)))
    elif owner is not module:
        setattr(owner, name, _updates_first(found, written))
    else:
        replace_everywhere(found, _updates_first(found, written))
    return True


def replace_everywhere(function: Any, replacement: Any) -> None:
    """Replace a function of a module in every module that has it, under any name: ``from`` imports copy it."""
    for module in tuple(sys.modules.values()):
        with suppress(AttributeError):
            names = object.__getattribute__(module, "__dict__")  # below lazy modules, which would be imported
            for name in [name for name, value in tuple(names.items()) if value is function]:
                names[name] = replacement


def _updates_first(function: Callable[..., Any], written: Written | None) -> Callable[..., Any]:
    """Return ``function``, with the due updates of every live optimizer made visible before it runs.

    Parameters that it writes count as external writes, after which optimizer state follows the weights.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def updates_first(*args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():  # graphs fetch what they read
            return function(*args, **keywords)
        # A forked child applies nothing, and may call this for parameters of its own. Reads of ours stay refused.
        engines = [
            engine
            for engine in ops.live_engines()
            if isinstance(engine, Engine) and not isinstance(engine, ForkedEngine)
        ]
        call = signature.bind(*args, **keywords) if engines and written is not None else None
        for engine in engines:
            try:
                engine.access.apply_due()
                engine.access.hold_weights()
            except Exception:
                call = call or signature.bind(*args, **keywords)
                if _may_read(engine, call.arguments):
                    raise
        if call is None:
            return function(*args, **keywords)
        params = [] if written is None else written(call.arguments)
        params = [each for each in params if any(one.index_of(each) is not None for one in engines)]
        try:
            return function(*call.args, **call.kwargs)
        finally:
            torch.autograd.graph.increment_version(params)

    return updates_first


_CONTAINERS = (list, tuple, Mapping, Set, ValuesView)


def _may_read(engine: Engine, arguments: dict[str, Any]) -> bool:
    """Whether a function may read parameters of ``engine``, which has failed.

    It may, unless all tensors that it is given have other memory. This lists the iterators among ``arguments``; tensors
    that they compute may come from any parameter.
    """
    own = {_memory_of(param) for param in engine.params}
    found = False
    for name, value in arguments.items():
        computed = isinstance(value, Iterator)
        if computed:
            value = arguments[name] = list(value)
        found |= isinstance(value, _CONTAINERS) and not value  # there is nothing to read
        for tensor in _tensors_in(value, depth=3):
            found = True
            if _memory_of(tensor) in own or (computed and not isinstance(tensor, nn.Parameter)):
                return True
    return not found


def _memory_of(tensor: Tensor) -> int | None:
    """Identity of the memory; None for a sparse tensor, which has no single one."""
    if torch_private.is_dtensor(tensor):
        tensor = torch_private.local_tensor(tensor)
    return torch_private.storage_identity(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def _tensors_in(value: Any, *, depth: int) -> Iterator[Tensor]:
    """The tensors of an argument: itself, those of a module, and of ``depth`` levels of containers and objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth:
        inner = value.values() if isinstance(value, Mapping) else value
        if not isinstance(inner, _CONTAINERS):
            inner = getattr(value, "__dict__", {}).values()
        for each in inner:
            yield from _tensors_in(each, depth=depth - 1)
