"""Functions of other packages that read or write parameters directly, between the steps of a compiled model.

They give what they give in the same program with AdamW, without an option and without a call of ``synchronize()``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    TOLERANCE,
    Layers,
    assert_trained,
    difference,
    weights,
)
from tests.integrations.vision import import_timm
from tests.support.gated_jobs import UPDATES, failed_jobs
from tests.support.processes import in_child
from tests.support.training import take_step
from zenflow_compile import weight_readers
from zenflow_compile.import_hook import ImportHook

STEPS = 6

Values = dict[str, Tensor]
Program = Callable[["Loop"], Values]


class Loop:
    """A training loop. The program that uses it reads and writes parameters between its steps.

    Args:
        options: of ``ZenFlowAdamW``, with a compiled model; None: ``torch.optim.AdamW``, uncompiled.
    """

    def __init__(self, options: dict[str, Any] | None, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = Layers() if model is None else model
        self.named = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        self.optimizer: Any
        self.call: Any = self.model
        if options is None:
            self.optimizer = torch.optim.AdamW([param for _, param in self.named], **ADAM)
        else:
            self.optimizer = zf.ZenFlowAdamW(self.named, **options)
            self.call = torch.compile(self.model, **EAGER_BACKEND)

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Run that many steps, and yield the number of each."""
        for step in range(count):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 16, generator=generator)
            take_step(self.call(inputs.to(self.named[0][1].dtype)).square().mean(), self.optimizer)
            yield step

    @torch.no_grad()
    def evaluated(self) -> list[Tensor]:
        """The outputs of the compiled and of the uncompiled model."""
        inputs = torch.ones(1, 16, dtype=self.named[0][1].dtype)
        return [self.call(inputs), self.model(inputs)]


def named(tensors: Any) -> Values:
    return {str(index): tensor.detach().clone() for index, tensor in enumerate(tensors)}


def averaged_model(loop: Loop) -> Values:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in loop.steps():
        average.update_parameters(loop.model)
    return weights(average.module)


def vector(loop: Loop) -> Values:
    from torch.nn.utils import parameters_to_vector

    def read(step: int) -> Tensor:
        params = loop.model.parameters()
        return parameters_to_vector(params if step % 2 else (param.detach().double() for param in params))

    return named(map(read, loop.steps()))


def averaged_vector(loop: Loop) -> Values:
    """Lookahead: every other step, the weights return halfway to where they were."""
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    slow = parameters_to_vector(loop.model.parameters()).detach()
    for step in loop.steps():
        if step % 2:
            slow = slow.lerp(parameters_to_vector(loop.model.parameters()).detach(), 0.5)
            vector_to_parameters(slow.clone(), loop.model.parameters())
    return weights(loop.model)


def diffusers_ema(parameters: Any, **settings: Any) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(parameters, decay=0.5, **settings)


def diffusers_average(loop: Loop, *, foreach: bool = False) -> Values:
    average = diffusers_ema(loop.model.parameters(), foreach=foreach)
    late: Any = None
    for step in loop.steps():
        average.step(loop.model.parameters())
        if step == 2:
            late = diffusers_ema(loop.model.parameters())
    return named([*average.shadow_params, *late.shadow_params])


def diffusers_evaluation(loop: Loop, *, foreach: bool = False) -> Values:
    """Evaluate the average after every step, and train on from the weights that were stored."""
    average, seen = diffusers_ema(loop.model.parameters(), foreach=foreach), []
    for _ in loop.steps():
        average.step(loop.model.parameters())
        average.store(loop.model.parameters())
        average.copy_to(loop.model.parameters())
        seen += loop.evaluated()
        average.restore(loop.model.parameters())
    return {**weights(loop.model), **named(seen)}


def diffusers_restart(loop: Loop) -> Values:
    """Train on from the average."""
    average = diffusers_ema(loop.model.parameters())
    for step in loop.steps():
        average.step(loop.model.parameters())
        if step == 2:
            average.copy_to(loop.model.parameters())
    return weights(loop.model)


def timm_average(loop: Loop, *, version: str, **settings: Any) -> Values:
    import_timm()
    average = getattr(importlib.import_module("timm.utils.model_ema"), version)(loop.model, decay=0.5, **settings)
    for _ in loop.steps():
        average.update(loop.model)
    return weights(average.module)


def trl_reference(loop: Loop) -> Values:
    from accelerate import Accelerator
    from trl.trainer.callbacks import SyncRefModelCallback

    Accelerator(cpu=True)
    reference = Layers()
    callback = SyncRefModelCallback(reference, accelerator=None)
    settings = types.SimpleNamespace(ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    for step in loop.steps():
        state = types.SimpleNamespace(global_step=step)
        callback.on_step_end(settings, state, None, model=loop.model)
    return weights(reference)


def trl_vllm(loop: Loop) -> Values:
    """The weights that are sent to vLLM after each step."""
    from trl.generation.vllm_generation import VLLMGeneration

    sender = VLLMGeneration.__new__(VLLMGeneration)
    sender.model = loop.model
    sender._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda params: contextlib.nullcontext())
    return named([param.clone() for _ in loop.steps() for _, param in sender._iter_named_params()])


def trl_vllm_client(loop: Loop) -> Values:
    from trl.generation.vllm_client import VLLMClient

    client, sent = VLLMClient.__new__(VLLMClient), []
    client.update_named_params = lambda metadata, params: sent.extend([param.clone() for _, param in params])
    for _ in loop.steps():
        client.update_model_params(loop.model)
    return named(sent)


def soft_target(loop: Loop) -> Values:
    """The target network of TD3 and SAC, with a function that another module has imported by name."""
    from stable_baselines3.td3 import td3

    target = Layers()
    for _ in loop.steps():
        td3.polyak_update(loop.model.parameters(), target.parameters(), 0.5)
    return weights(target)


def lightning_average(loop: Loop) -> Values:
    """Swap weights and average for a validation after every step, and train on."""
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    callback, seen = EMAWeightAveraging(), []
    callback._average_model = AveragedModel(loop.model, avg_fn=get_ema_avg_fn(0.5))
    for step in loop.steps():
        if step != 3:  # then the swap is the first that reads weights
            callback._average_model.update_parameters(loop.model)
        callback.on_validation_epoch_start(None, loop.model)
        seen += loop.evaluated()
        callback.on_validation_epoch_end(None, loop.model)
    before = weights(loop.model)
    callback.on_train_end(None, loop.model)
    if isinstance(loop.optimizer, zf.ZenFlowAdamW):
        loop.optimizer.close()
    return {**named(before.values()), **weights(loop.model), "seen": torch.cat(seen)}


def lightning_swa(loop: Loop) -> Values:
    from lightning.pytorch.callbacks import StochasticWeightAveraging as Average

    average, count = Layers(), torch.tensor(0)
    for step in loop.steps():
        Average.update_parameters(average, loop.model, count, Average.avg_fn)
        if step == 3:
            Average.transfer_weights(average, loop.model)
    return {**weights(average), **named(loop.model.parameters())}


PROGRAMS: dict[str, Program] = {
    "AveragedModel": averaged_model,
    "parameters_to_vector": vector,
    "vector_to_parameters": averaged_vector,
    "diffusers": diffusers_average,
    "diffusers_foreach": lambda loop: diffusers_average(loop, foreach=True),
    "diffusers_evaluation": diffusers_evaluation,
    "diffusers_evaluation_foreach": lambda loop: diffusers_evaluation(loop, foreach=True),
    "diffusers_restart": diffusers_restart,
    "timm_v2": lambda loop: timm_average(loop, version="ModelEmaV2"),
    "timm_v3": lambda loop: timm_average(loop, version="ModelEmaV3"),
    "timm_v3_parameters": lambda loop: timm_average(loop, version="ModelEmaV3", exclude_buffers=True),
    "trl_reference": trl_reference,
    "trl_vllm": trl_vllm,
    "trl_vllm_client": trl_vllm_client,
    "stable_baselines3": soft_target,
    "lightning_average": lightning_average,
    "lightning_swa": lightning_swa,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_readers_equal_those_of_adamw(name: str) -> None:
    expected = PROGRAMS[name](Loop(None))
    assert difference(PROGRAMS[name](Loop(EXACT)), expected) < TOLERANCE


class AdaptedLayers(Loop):
    """``Layers`` with LoRA adapters in two of three layers.

    Args:
        whole: the weights that adapters are merged into are trained, too.
    """

    def __init__(self, options: dict[str, Any] | None, *, whole: bool) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=16, target_modules=["first", "middle"], init_lora_weights=False)
        self.adapted = get_peft_model(Layers(), config)
        if whole:
            self.adapted.requires_grad_(True)
        super().__init__(options, self.adapted)


@pytest.mark.parametrize("whole", [False, True], ids=["adapters", "all_weights"])
def test_merges_equal_those_of_adamw(whole: bool) -> None:
    """Merge after a step, for weights that are sent to vLLM, and at the end."""
    from trl.generation.vllm_generation import VLLMGeneration

    found: list[Values] = []
    for options in (None, EXACT):
        loop = AdaptedLayers(options, whole=whole)
        before = named(param for _, param in loop.named)
        sender = VLLMGeneration.__new__(VLLMGeneration)
        sender.model, sent = loop.adapted, []
        sender._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda params: contextlib.nullcontext())
        sender._fix_param_name_to_vllm = lambda name, extra_prefixes: name
        for step in loop.steps():
            if step in (1, 3):
                sent += [param.clone() for _, param in sender._iter_named_params()]
            elif whole and step == 4:  # the last step trains merged weights
                loop.adapted.merge_adapter()
        trained = [param for _, param in loop.named]
        merged = weights(loop.adapted.merge_and_unload())
        assert_trained(before, named(trained))  # last: in front of the merge, reads of these raise
        found.append({**named(sent), **merged})
    assert difference(found[1], found[0]) < TOLERANCE


@pytest.mark.usefixtures("small_weights")
@pytest.mark.parametrize("name", ["AveragedModel", "diffusers_evaluation", "trl_vllm"])
def test_readers_of_weights_in_host_memory(name: str) -> None:
    loop = Loop({**EXACT, "offload_weights": 1.0})
    found = PROGRAMS[name](loop)
    assert loop.optimizer.engine.weights.weights, "the weights are in host memory"
    assert difference(found, PROGRAMS[name](Loop(None))) < TOLERANCE


@pytest.mark.parametrize("interval", [1, 4])
def test_readers_leave_the_trajectory(interval: int) -> None:
    """Also in bf16, whose masters have more digits than the weights that an evaluation stores and restores."""
    options = {**EXACT, "update_interval": interval}
    found = []
    for program in (lambda loop: list(loop.steps()), diffusers_average, diffusers_evaluation):
        torch.manual_seed(0)
        loop = Loop(options, Layers().bfloat16())
        program(loop)
        loop.optimizer.close()
        found.append(weights(loop.model))
    assert difference(found[1], found[0]) == 0
    assert difference(found[2], found[0]) == 0


def test_reader_applies_updates_of_every_optimizer() -> None:
    """A generator and a critic with an optimizer each; one average has both."""
    from torch.optim.swa_utils import AveragedModel

    found = []
    for options in (None, EXACT):
        torch.manual_seed(0)
        both = nn.ModuleList([Layers(), Layers()])
        loops = [Loop(options, model) for model in both]
        average = AveragedModel(both)
        for _ in zip(*(loop.steps() for loop in loops), strict=True):
            average.update_parameters(both)
        found.append(weights(average.module))
    assert difference(*found) < TOLERANCE


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["parameters", "generator", "module", "sharded"])
def test_reader_of_another_model_hears_of_no_failure(kind: str) -> None:
    """After a run that failed, whose objects a traceback keeps, a new one begins in the same process."""
    from stable_baselines3.common.utils import polyak_update
    from torch.optim.swa_utils import AveragedModel

    def read(model: nn.Module) -> None:
        if kind == "module":
            AveragedModel(model).update_parameters(model)
        else:
            nn.utils.parameters_to_vector((list if kind == "parameters" else iter)(model.parameters()))

    failed, loop = (Loop(EXACT, fully_shard(Layers()) if kind == "sharded" else None) for _ in range(2))
    with failed_jobs(RuntimeError("on purpose"), UPDATES), pytest.raises(RuntimeError, match="host update"):
        list(failed.steps())
    for _ in loop.steps(2):
        read(loop.model)
        polyak_update([], [], 1.0)  # the statistics of no normalization
    views = [param.data.view(-1) for param in loop.model.parameters()]
    assert torch.equal(nn.utils.parameters_to_vector(views), torch.cat(views))
    for params in (failed.model.parameters(), [None], (view.square() for view in views)):
        with pytest.raises(RuntimeError, match="host update"):
            nn.utils.parameters_to_vector(params)
    for use in (lambda: read(failed.model), failed.optimizer.close):
        with pytest.raises(RuntimeError, match="host update"):
            use()


# How functions are replaced.


def test_function_without_optimizers_is_only_called(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(EXACT)
    for _ in loop.steps(1):
        pass
    loop.optimizer.close()
    monkeypatch.setattr(weight_readers.ops, "live_engines", lambda: iter(()))
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    diffusers_ema([torch.zeros(3), torch.zeros(2)]).copy_to(param for param in params)
    assert [param._version for param in params] == [0, 0]
    assert torch.equal(nn.utils.parameters_to_vector(params), torch.zeros(5))


def test_forked_child_reads_parameters_of_its_own() -> None:
    """An update is in flight in the parent: reads of its weights are refused there, and in the child."""
    loop = Loop(EXACT)
    for _ in loop.steps(2):
        pass
    own, served = nn.Parameter(torch.ones(2)), next(loop.model.parameters())
    assert in_child(nn.utils.parameters_to_vector, [own]) == "returned None"
    assert "is in flight" in in_child(nn.utils.parameters_to_vector, [served])


def test_foreign_parameters_keep_their_version() -> None:
    loop = Loop(EXACT)
    for _ in loop.steps(2):
        other = nn.Parameter(torch.ones(2))
        average = diffusers_ema([nn.Parameter(torch.zeros(2))])
        average.copy_to(iter([other]))
        assert other._version == 0
        assert other.sum() == 0


def test_replaced_function_is_traced_into_one_graph() -> None:
    loop = Loop(EXACT)
    for _ in loop.steps(2):
        pass
    other = [torch.ones(3), torch.ones(2)]
    call = torch.compile(lambda: nn.utils.parameters_to_vector(other) * 2, backend="eager", fullgraph=True)
    assert torch.equal(call(), torch.full((5,), 2.0))


PACKAGE = "package_of_readers"
SOURCE = """
class Average:
    def update(self, model):
        return "read"

    @staticmethod
    def swap(model):
        return "swapped"

def soft_update(parameters):
    return "soft"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that no test has imported, with an optimizer that expects three functions in it."""
    (tmp_path / f"{PACKAGE}.py").write_text(SOURCE)
    (tmp_path / "program.py").write_text(f"from {PACKAGE} import soft_update as update_softly\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (PACKAGE, "program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = {"Average.update": None, "Average.swap": None, "soft_update": None}
    monkeypatch.setitem(weight_readers.FUNCTIONS, PACKAGE, names)  # type: ignore[arg-type]
    monkeypatch.setattr(weight_readers, "version", lambda package: "1.2")
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each is not weight_readers.hook])
    monkeypatch.setattr(weight_readers, "hook", ImportHook({PACKAGE: weight_readers.adapt}))
    return tmp_path / f"{PACKAGE}.py"


def new_optimizer() -> zf.ZenFlowAdamW:
    return zf.ZenFlowAdamW([nn.Parameter(torch.ones(4, 4))], lr=1e-3)


def assert_replaced(module: Any) -> None:
    functions = [module.Average.update, module.Average.swap, module.soft_update, sys.modules["program"].update_softly]
    assert all(hasattr(function, "__wrapped__") for function in functions)
    assert (module.Average().update(None), module.Average.swap(None), module.soft_update([])) == (
        "read", "swapped", "soft",
    )  # fmt: skip


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("first", ["package", "optimizer"])
def test_functions_are_replaced_in_either_order(first: str) -> None:
    """Also where another module has imported one by name, before there was an optimizer."""
    optimizer = None if first == "package" else new_optimizer()
    module = importlib.import_module(PACKAGE)
    importlib.import_module("program")
    if optimizer is None:
        assert not hasattr(module.soft_update, "__wrapped__"), "an import alone changes nothing"
        optimizer = new_optimizer()
    assert_replaced(module)
    replaced = module.soft_update
    new_optimizer()
    assert module.soft_update is replaced
    importlib.reload(module)
    importlib.reload(sys.modules["program"])
    assert_replaced(module)


@pytest.mark.parametrize("first", ["package", "optimizer"])
def test_renamed_function_warns_once_by_name(first: str, package: Path) -> None:
    package.write_text(SOURCE.replace("update", "renew"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if first == "optimizer":
            new_optimizer()
        module = importlib.import_module(PACKAGE)
        new_optimizer()
        new_optimizer()
    (text,) = [str(each.message) for each in caught if PACKAGE in str(each.message)]
    assert text.startswith(f"{PACKAGE} 1.2 has no {PACKAGE}.Average.update, {PACKAGE}.soft_update,")
    assert "call optimizer.synchronize()" in text
    assert hasattr(module.Average.swap, "__wrapped__"), "those that exist are replaced"


def test_renamed_function_of_an_uninstalled_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_text(SOURCE.replace("update", "renew"))
    monkeypatch.setattr(weight_readers, "version", importlib.metadata.version)
    new_optimizer()
    with pytest.warns(UserWarning, match=f"^{PACKAGE} has no {PACKAGE}.Average.update"):
        importlib.import_module(PACKAGE)


def test_installed_packages_have_all_functions() -> None:
    import_timm()
    new_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name in weight_readers.FUNCTIONS:
            weight_readers.adapt(importlib.import_module(name))
