"""Trains programs that know nothing of this package: what ``zenflow-compile run`` replaces while a program runs.

``torch.optim.AdamW``, and ``torch.optim.Adam`` without weight decay, make a ``ZenFlowAdamW`` with the program's own
hyperparameters, other optimizers of PyTorch a ``ZenFlow`` with their rule. Where the program compiles with Inductor,
``backend="zenflow"`` does. Trainers get the callbacks that flush at the end of training. What is not replaced is named,
and is what it would have been.
"""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zenflow_compile.import_hook import ImportHook
from zenflow_compile.integrations.pytorch_rules import NAMES, rule_of
from zenflow_compile.optimizer import ZenFlow, ZenFlowAdamW
from zenflow_compile.torch_internals import torch_private
from zenflow_compile.weight_readers import replace_everywhere

_KEPT = ("lr", "betas", "eps", "weight_decay", "maximize")
"""Keywords of ``torch.optim.AdamW`` and ``Adam`` that a ``ZenFlowAdamW`` takes over."""

_ORIGINALS = {name: getattr(torch.optim, name) for name in NAMES}  # not as names, which would be replaced, too

_EXECUTION = ("foreach", "fused", "capturable", "differentiable")
_LOW = (torch.bfloat16, torch.float16)
_CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""Inductor's modes with CUDA graphs, which would repeat copies, and those without."""


@dataclass
class Program:
    """What was found in a program, and what became of it.

    Attributes:
        options: keywords of ``ZenFlowAdamW`` besides those of AdamW.
        say: called with a line as soon as something is known.
        compiles: compile models that the program does not compile.
        keeps_compiler: leave ``torch.compile`` alone.
        keeps_others: leave all optimizers but ``torch.optim.AdamW`` alone.
    """

    options: Mapping[str, Any]
    say: Callable[[str], None]
    compiles: bool = False
    keeps_compiler: bool = False
    keeps_others: bool = False
    _made: weakref.WeakKeyDictionary[Optimizer, type[Optimizer]] = field(default_factory=weakref.WeakKeyDictionary)
    _undecayed: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    _left: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    _stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    _said: Counter[str] = field(default_factory=Counter)
    _replaced_any: bool = False

    @property
    def optimizers(self) -> list[ZenFlow]:
        """Those that were made in place of others, have done a step, and are still referred to."""
        return [each for each in self._made if each in self._stepped and isinstance(each, ZenFlow)]

    def say_once(self, line: str) -> None:
        self._said[line] += 1
        if self._said[line] == 1:
            self.say(line)

    def end(self) -> None:
        """Say what was found several times, and whether nothing was replaced."""
        for line, count in self._said.items():
            if count > 1:
                self.say(f"{line} ({count} times in all)")
        if not self._replaced_any:
            self.say(
                "nothing was replaced: in this process, no optimizer of torch.optim was made that has a rule here. "
                'Processes that a program forks say theirs; those that it starts by "spawn" import it '
                "anew, without what `run` replaces: start several processes with torchrun -m zenflow_compile run"
            )

    def stands_for(self, instance: object, original: type[Optimizer]) -> bool:
        """Whether the program sees ``instance`` as one of ``original``."""
        if isinstance(instance, ZenFlow):
            return issubclass(self._made.get(instance, _ORIGINALS["AdamW"]), original)
        return isinstance(instance, original)

    def optimizer(self, original: type[Optimizer], args: tuple[Any, ...], keywords: dict[str, Any]) -> Optimizer:
        """Make the optimizer that the program gets for a call of ``original``."""
        call = inspect.signature(original).bind(*args, **keywords)
        call.apply_defaults()
        given = call.arguments
        if isinstance(given["params"], Tensor):
            return original(*args, **keywords)  # raises
        given["params"] = groups = list(given["params"])  # a generator can be read once
        for group in groups:
            if isinstance(group, dict) and not isinstance(group["params"], Tensor):
                group["params"] = list(group["params"])
        size = _size(groups)
        try:
            rule = rule_of(original.__name__, given)
            if rule is None:
                optimizer: ZenFlow = self._ours(ZenFlowAdamW, groups, {name: given[name] for name in _KEPT})
            else:
                optimizer = self._ours(partial(ZenFlow, rule=rule), groups, {"maximize": given.get("maximize", False)})
                _keep_numbers(optimizer, given)
        except (ValueError, TypeError) as error:
            left = original(*call.args, **call.kwargs)
            self._left.add(left)
            self.say_once(f"left alone: {original.__name__} over {size}: {error}")
            return left
        self._made[optimizer] = original
        self._replaced_any = True
        if rule is None and original is _ORIGINALS["Adam"] and not given.get("decoupled_weight_decay"):
            self._undecayed.add(optimizer)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        low = any(param.dtype in _LOW for param in _params(groups))
        rounds = f", with fp32 masters, where {original.__name__} would round each step to the weights' 16 bits"
        by = "ZenFlowAdamW(" if rule is None else f"ZenFlow({type(rule).__name__}, "
        self.say_once(f"replaced: {original.__name__} over {size} by {by}{options}){rounds if low else ''}")
        return optimizer

    def _ours(self, make: Callable[..., ZenFlow], groups: list[Any], keywords: dict[str, Any]) -> ZenFlow:
        before = [dict(group) if isinstance(group, dict) else group for group in groups]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            sharded = any(torch_private.is_dtensor(param) for param in _params(groups))
            # The program averages gradients by itself, as for any optimizer.
            keywords["process_group"] = None if sharded else False
        try:
            return make(groups, **keywords, **self.options)
        except BaseException:
            for group, content in zip(groups, before, strict=True):
                if isinstance(group, dict):  # optimizers add their defaults to it
                    group.clear()
                    group.update(content)
            raise

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Called before each step of any optimizer.

        Raises:
            RuntimeError: weight decay was given to an Adam that was replaced, after it was made.
        """
        if optimizer in self._undecayed and any(group["weight_decay"] for group in optimizer.param_groups):
            raise RuntimeError(
                "the program has given a weight decay to a torch.optim.Adam that was made without, and that "
                "zenflow-compile run has replaced: Adam adds it to the gradient, and AdamW's rule does not. Run with "
                "--keep-others, which replaces torch.optim.AdamW alone"
            )
        if optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        if not isinstance(optimizer, ZenFlow):
            if optimizer not in self._left:
                kind, size = type(optimizer), _size(optimizer.param_groups)
                why = "it was imported before the program began" if kind in _ORIGINALS.values() else "another rule"
                self.say_once(f"left alone: {kind.__name__} over {size}: {why}")
        elif self.compiles:
            self._compile_model_of(optimizer)

    def _compile_model_of(self, optimizer: ZenFlow) -> None:
        """Compile the module that has all parameters of ``optimizer``, from its next call on."""
        params = {id(param) for param in _params(optimizer.param_groups)}
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # not what proxies show
        whole = [each for each in modules if params <= {id(param) for param in each.parameters()}]
        if not whole:
            self.say_once(f"not compiled: no module has the {len(params)} parameters of an optimizer")
            return
        if any(isinstance(each, DistributedDataParallel) for each in whole):
            self.say_once("not compiled: the model is inside DistributedDataParallel, whose hooks work without")
            return
        model = min(whole, key=lambda each: sum(1 for _ in each.modules()))
        if not any(map(torch_private.is_compiled, model.modules())):
            model.compile(backend="zenflow")
            self.say_once(f"compiled: {type(model).__name__}, by backend='zenflow', from its second step on")

    def compiled_with(self, backend: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords that ``torch.compile`` gets."""
        if backend == "inductor":
            if (mode := keywords.get("mode")) in _CUDA_GRAPHS:
                self.say_once(f"replaced: torch.compile(mode={mode!r}) by backend='zenflow' without CUDA graphs")
                return {**keywords, "mode": _CUDA_GRAPHS[mode], "backend": "zenflow"}
            self.say_once("replaced: torch.compile with Inductor by backend='zenflow'")
            return {**keywords, "backend": "zenflow"}
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        if name != "zenflow":
            self.say_once(f"left alone: torch.compile(backend={name!r}): its graphs overlap nothing with updates")
        return {**keywords, "backend": backend}


def _keep_numbers(optimizer: ZenFlow, given: Mapping[str, Any]) -> None:
    """Have the numbers of PyTorch's optimizer that the rule lacks in its groups, too, where programs read them."""
    others = {name: value for name, value in given.items() if name not in ("params", *_EXECUTION)}
    for values in (optimizer.defaults, *optimizer.param_groups):
        for name, value in others.items():
            values.setdefault(name, value)


def _params(groups: list[Any]) -> list[Tensor]:
    params: list[Tensor] = []
    for group in groups:
        listed = group["params"] if isinstance(group, dict) else [group]
        listed = [listed] if isinstance(listed, Tensor) else listed
        params += [each[1] if isinstance(each, tuple) else each for each in listed]
    return params


def _size(groups: list[Any]) -> str:
    params = _params(groups)
    known = [param for param in params if isinstance(param, Tensor) and not is_lazy(param)]
    return f"{len(params)} parameters of {sum(param.numel() for param in known):,} elements"


class _StandIn(ABCMeta):
    """The class of what a program finds in place of an optimizer's class.

    A call makes the optimizer. For anything else it is the class: subclasses derive from the original one, and what was
    made in its place is an instance of it.
    """

    original: type[Optimizer]
    program: Program

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        bases = tuple(base.original if isinstance(base, _StandIn) else base for base in bases)
        kind, _, keywords = types.prepare_class(name, bases, keywords)
        return kind(name, bases, namespace, **keywords)

    @classmethod
    def of(cls, original: type[Optimizer], program: Program) -> _StandIn:
        content = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        content |= {"original": original, "program": program, "__signature__": inspect.signature(original)}
        return ABCMeta.__new__(cls, original.__name__, (original,), content)

    def __call__(cls, *args: Any, **keywords: Any) -> Optimizer:
        return cls.program.optimizer(cls.original, args, keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.program.stands_for(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, (cls.original, ZenFlow))


@contextmanager
def served(program: Program) -> Iterator[None]:
    """Have ``program.options`` used by everything that runs in the block; afterwards, nothing is replaced any more."""
    with ExitStack() as undo:
        for name, original in _ORIGINALS.items():
            if name != "AdamW" and program.keeps_others:
                continue
            stand_in = _StandIn.of(original, program)
            replace_everywhere(original, stand_in)
            undo.callback(replace_everywhere, stand_in, original)
        undo.callback(register_optimizer_step_pre_hook(program.before_step).remove)
        if not program.keeps_compiler:
            _replace(undo, torch, "compile", _compiling(torch.compile, program))
        adapters: dict[str, Callable[[ModuleType], None]] = {
            "transformers.trainer": partial(_adapt_transformers, undo),
            "accelerate.optimizer": partial(_adapt_accelerate, undo),
            "lightning.pytorch": partial(_adapt_lightning, undo),
            "pytorch_lightning": lambda _: program.say_once(
                "left alone: trainers of pytorch_lightning, which do not flush: pass --total-steps, or import lightning"
            ),
        }
        hook_on_imports = ImportHook(adapters)
        undo.callback(hook_on_imports.uninstall)
        hook_on_imports.install()
        yield


def _replace(undo: ExitStack, owner: Any, name: str, replacement: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, replacement)


def _compiling(original: Callable[..., Any], program: Program) -> Callable[..., Any]:
    @wraps(original)
    def compile_for(model: Any = None, *, backend: Any = "inductor", **keywords: Any) -> Any:
        return original(model, **program.compiled_with(backend, keywords))

    return compile_for


def _adapt_transformers(undo: ExitStack, trainer: ModuleType) -> None:
    from zenflow_compile.integrations.transformers import ZenFlowCallback

    class Callback(ZenFlowCallback):
        """Leaves the training of other optimizers alone."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            optimizer = keywords["optimizer"]
            if isinstance(getattr(optimizer, "optimizer", optimizer), ZenFlow):
                super().on_train_begin(args, state, control, **keywords)

        def _check(self, optimizer: ZenFlow, args: Any) -> None:
            """The program's numbers are those that AdamW would have had."""

    trainer.DEFAULT_CALLBACKS.append(Callback)
    undo.callback(trainer.DEFAULT_CALLBACKS.remove, Callback)


def _adapt_accelerate(undo: ExitStack, module: ModuleType) -> None:
    """Keep Accelerate from moving a copy of the complete state through the device."""
    original = module.AcceleratedOptimizer.__init__

    @wraps(original)
    def wrap(self: Any, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        original(self, optimizer, device_placement and not isinstance(optimizer, ZenFlow), scaler)

    _replace(undo, module.AcceleratedOptimizer, "__init__", wrap)


def _adapt_lightning(undo: ExitStack, module: ModuleType) -> None:
    from zenflow_compile.integrations.lightning import ZenFlowCallback

    original = module.Trainer.__init__

    @wraps(original)
    def create(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        self.callbacks.append(ZenFlowCallback())

    _replace(undo, module.Trainer, "__init__", create)
