"""The Hugging Face Trainer, as its users start it, with ZenFlowAdamW in place of AdamW."""

from __future__ import annotations

import copy
import functools
import gc
import json
import math
import os
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from accelerate.utils.dataclasses import BaseEnum
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    INTERVALS,
    WINDOWED,
    Numbers,
    Tokens,
    assert_as_adamw,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    nudge,
    offloaded,
    open_gradients,
    tiny_llama,
    weights,
)
from zenflow_compile.integrations import accelerate as adapter
from zenflow_compile.integrations.accelerate import register_backend
from zenflow_compile.integrations.transformers import ZenFlowCallback
from zenflow_compile.runtime import ops

ENTRIES = ["eager", "compiled", "named"]
"""Gradient hooks; ``model.compile(backend="zenflow")``; ``torch_compile_backend="zenflow"``."""

ARGUMENTS: dict[str, Any] = {
    "learning_rate": ADAM["lr"],
    "weight_decay": ADAM["weight_decay"],
    "adam_epsilon": ADAM["eps"],
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "max_steps": 5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class InnerEagerTrainer(Trainer):
    """Runs what Accelerate compiles without Inductor, which takes seconds for each graph."""

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**keywords)
        if self.args.torch_compile:
            built["dynamo_plugin"].options = {"inner": "eager"}
        return built


@dataclass
class Run:
    """The results of a training."""

    trainer: Trainer
    weights: dict[str, Tensor]
    dense: dict[str, int]

    @property
    def optimizer(self) -> zf.ZenFlowAdamW:
        return self.trainer.optimizer.optimizer  # type: ignore[union-attr, no-any-return]

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def saved(self, step: int) -> dict[str, Tensor]:
        return load_file(Path(self.trainer.args.output_dir) / f"checkpoint-{step}" / "model.safetensors")


def output_folder() -> str:
    """A folder that pytest's are next to, which goes at the end of the run."""
    return tempfile.mkdtemp(prefix="pytest-trainer-")


def model_of() -> nn.Module:
    return tiny_llama(num_hidden_layers=1)


def train(
    entry: str,
    options: Mapping[str, Any] | None,
    *,
    folder: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    trainer: type[Trainer] = InnerEagerTrainer,
    resume: str | None = None,
    nudged: float | None = None,
    **arguments: Any,
) -> Run:
    """Train a small Llama.

    Args:
        entry: one of ``ENTRIES``.
        options: of ``ZenFlowAdamW``; None: the Trainer's own AdamW.
        resume: a checkpoint.
        nudged: change the first weights in their last place, towards this number.
        arguments: of ``TrainingArguments``, besides ``ARGUMENTS``.
    """
    model = model_of()
    if nudged is not None:
        nudge(model, nudged)
    if entry == "compiled":
        model.compile(**EAGER_BACKEND)
    elif entry == "named":
        register_backend()
        arguments["torch_compile_backend"] = "zenflow"
    output = output_folder() if folder is None else folder
    built = trainer(
        model=model,
        args=TrainingArguments(output_dir=str(output), **{**ARGUMENTS, **arguments}),
        train_dataset=Tokens(24),
        eval_dataset=Tokens(8),
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=None if options is None else (zf.ZenFlowAdamW, dict(options)),
    )
    with zf.profile() as profile:
        built.train(resume_from_checkpoint=resume)
    dense = {} if options is None else dense_gradients(profile)
    return Run(built, weights(model), dense)


@functools.cache
def adamw(trainer: type[Trainer] = Trainer, **arguments: Any) -> Run:
    """The same training with AdamW, once for each configuration."""
    return train("eager", None, trainer=trainer, **arguments)


LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate")
# Runs that differ by a rounding of half precision: implementations of AdamW, and the last digit of the first weights.
HALF_VARIANTS: list[dict[str, Any]] = [
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch", "nudged": math.inf},
    {"optim": "adamw_torch", "nudged": -math.inf},
    {"optim": "adamw_torch_fused"},
]


def assert_equal_runs(run: Run, *variants: Run) -> None:
    """Weights, losses, gradient norms and evaluations are AdamW's, and nothing was made dense.

    The Trainer clips with PyTorch's functions, which ask an offloaded gradient for its norm and multiply it: neither
    needs memory for it.
    """
    assert offloaded(run.optimizer) > 0
    assert run.dense == {}
    assert_trained(weights(model_of()), run.weights)
    logs = ({name: each.logged(name) for name in LOGGED} for each in (run, *variants))
    assert_as_adamw(*(Numbers(each.weights, log) for each, log in zip((run, *variants), logs, strict=True)))


@pytest.fixture(autouse=True)
def closed_optimizers() -> Iterator[None]:
    """Close engines that a cycle or a failure keeps alive after a test."""
    gc.collect()  # engines that failed in other tests, and are in a cycle, raise again when they are closed
    yield
    for engine in ops.live_engines():
        engine.close(flush=False)  # type: ignore[attr-defined]


# The Trainer's own features.


@pytest.mark.parametrize("entry", ENTRIES)
def test_defaults(entry: str) -> None:
    """Clipping, a linear schedule, groups with and without decay; with accumulation and evaluation."""
    arguments = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    run = train(entry, EXACT, **arguments)
    assert_equal_runs(run, adamw(**arguments))
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.01, 0.0]
    assert (len(run.optimizer.engine.graphs) > 0) == (entry != "eager")


@pytest.mark.parametrize("entry", ENTRIES[:2])
def test_small_max_grad_norm_clips(entry: str) -> None:
    clipped, free = adamw(max_grad_norm=0.05), adamw(max_grad_norm=0.0)
    assert difference(clipped.weights, free.weights) > 1e-3
    assert_equal_runs(train(entry, EXACT, max_grad_norm=0.05), clipped)
    assert_equal_runs(train("eager", EXACT, max_grad_norm=0.0), free)  # the norm is logged without clipping, too


def test_optimizers_argument_and_a_model_cast_later() -> None:
    """The Trainer moves the model in its constructor, when the optimizer exists; without a GPU it casts it here."""

    class Moves(Trainer):
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            model.float()

    found = []
    for optimizer_class, options in ((torch.optim.AdamW, ADAM), (zf.ZenFlowAdamW, EXACT)):
        model = model_of().double()
        optimizer = optimizer_class(model.parameters(), **options)
        trainer = Moves(
            model=model,
            args=TrainingArguments(output_dir=output_folder(), **ARGUMENTS),
            train_dataset=Tokens(24),
            optimizers=(optimizer, None),
        )
        trainer.train()
        found.append(Run(trainer, weights(model), {}))
    assert all(weight.dtype == torch.float32 for weight in found[1].weights.values())
    assert_equal_runs(found[1], found[0])


@pytest.mark.parametrize("entry", ENTRIES[:2])
def test_bf16(entry: str) -> None:
    """Autocast multiplies rounding: AdamW's own variants differ as much."""
    variants = [adamw(bf16=True, **variant) for variant in HALF_VARIANTS]
    assert difference(variants[-1].weights, adamw().weights) > 0  # autocast is on
    assert_equal_runs(train(entry, EXACT, bf16=True), *reversed(variants))


class ScalingTrainer(InnerEagerTrainer):
    """fp16 with a live GradScaler, which Accelerate makes for accelerators only. Its first step is skipped."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2, backoff_factor=2.0**-12)
        self.accelerator.scaler = scaler


@pytest.mark.parametrize("entry", ENTRIES[:2])
def test_fp16_with_a_skipped_step(entry: str) -> None:
    arguments = {"fp16": True, "gradient_accumulation_steps": 2}
    # Accelerate does not notice that the fused AdamW skips a step.
    # Accelerate steps the schedule after a skipped step of fused AdamW, unlike after one of the others.
    variants = [adamw(ScalingTrainer, **variant, **arguments) for variant in HALF_VARIANTS[:-1]]
    reference = variants[0]
    run = train(entry, EXACT, trainer=ScalingTrainer, **arguments)
    assert_equal_runs(run, *variants)
    assert run.logged("learning_rate")[:3] == [0.01, 0.01, 0.008]  # the schedule waited for the skipped step
    assert run.trainer.accelerator.scaler.get_scale() == reference.trainer.accelerator.scaler.get_scale() == 2.0**14
    steps = {int(state["step"]) for state in run.optimizer.state.values()}
    assert steps == {4}


def test_fp16_without_a_scaler() -> None:
    """On the CPU Accelerate takes fp16=True and trains in the model's dtype, without a scaler."""
    run = train("eager", EXACT, fp16=True)
    assert run.trainer.accelerator.scaler is None
    assert_equal_runs(run, adamw())


@pytest.mark.matrix(2)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("entry", ENTRIES[:2])
def test_resume_in_an_update_window(entry: str, interval: int, tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2, "save_steps": 3, "save_strategy": "steps", "max_steps": 6}
    whole = train(entry, INTERVALS[interval], folder=tmp_path, **arguments)
    saved = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert (open_gradients(saved) > 0) == (interval == 4)
    rest = train(
        entry, INTERVALS[interval], folder=tmp_path / "rest", resume=str(tmp_path / "checkpoint-3"), **arguments
    )
    assert_trained(whole.saved(3), rest.saved(6))
    assert_bitwise(rest.weights, whole.weights)
    assert rest.logged("grad_norm") == whole.logged("grad_norm")
    assert_bitwise(_flat(rest.optimizer.state_dict()), _flat(whole.optimizer.state_dict()))


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    entries = {f"{p}.{name}": value for p, each in state["state"].items() for name, value in each.items()}
    return {name: value for name, value in entries.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(("entry", "interval"), [("eager", 1), ("compiled", 4)])
def test_best_model_is_the_one_that_was_evaluated(entry: str, interval: int, tmp_path: Path) -> None:
    """Ascending losses: the best model is the first one, whose checkpoint has the evaluated weights."""
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    arguments = {**every, "load_best_model_at_end": True, "greater_is_better": True, "max_steps": 6}
    run = train(entry, INTERVALS[interval], folder=tmp_path, callbacks=[ZenFlowCallback()], **arguments)
    assert run.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    best = run.saved(2)
    assert_bitwise({name: run.weights[name] for name in best}, best)
    assert run.trainer.evaluate()["eval_loss"] == max(run.logged("eval_loss")) == run.logged("eval_loss")[0]
    if interval == 1:
        assert run.logged("eval_loss")[:3] == pytest.approx(adamw(**arguments).logged("eval_loss"), rel=1e-6)


FEATURES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "checkpointing": {"activation_checkpointing": True},
    "checkpointing_reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "neftune": {"neftune_noise_alpha": 5.0},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "empty_cache": {"torch_empty_cache_steps": 1},
    "tokens_seen": {"include_num_input_tokens_seen": "all"},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "eval_on_start": {"eval_on_start": True, "eval_strategy": "epoch", "max_steps": 7},
    "accumulation_3": {"gradient_accumulation_steps": 3},  # an epoch of 6 batches
    "accumulation_4": {"gradient_accumulation_steps": 4},  # the last accumulation of an epoch is shorter
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
}


def test_gradient_checkpointing_compiled() -> None:
    assert_equal_runs(train("compiled", EXACT, **FEATURES["checkpointing"]), _reference("checkpointing"))


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_features(entry: str, feature: str, bf16: bool) -> None:
    # The Trainer does not shift labels for its label smoother under torch_compile_backend=, with any backend.
    unshifted = entry == "named" and feature == "label_smoothing"
    compiled = {"torch_compile_backend": "aot_eager"} if unshifted else {}
    if not bf16:
        assert_equal_runs(train(entry, EXACT, **FEATURES[feature]), _reference(feature, **compiled))
        return
    variants = [_reference(feature, bf16=True, **variant, **compiled) for variant in HALF_VARIANTS]
    run = train(entry, EXACT, bf16=True, **FEATURES[feature])
    assert_equal_runs(run, *reversed(variants))


@functools.cache
def _reference(feature: str, **arguments: Any) -> Run:
    return train("eager", None, trainer=Trainer, **FEATURES[feature], **arguments)


@pytest.mark.long
@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - {"label_smoothing"}))
def test_windows_do_not_depend_on_the_entry(feature: str) -> None:
    eager, *others = [train(entry, WINDOWED, **FEATURES[feature]) for entry in ENTRIES]
    assert difference(eager.weights, _reference(feature).weights) > 1e-3
    for other in others:
        assert difference(other.weights, eager.weights) <= 1e-5


def test_inductor_behind_torch_compile_backend() -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 3}
    run = train("named", EXACT, trainer=Trainer, **arguments)
    assert_equal_runs(run, adamw(**arguments))
    assert len(run.optimizer.engine.graphs) > 0


# Before and after train().


def test_evaluation_and_prediction_before_training() -> None:
    register_backend()
    runs, losses = [], []
    for options in (None, EXACT):
        trainer = InnerEagerTrainer(
            model=model_of(),
            args=TrainingArguments(
                output_dir=output_folder(), torch_compile_backend=None if options is None else "zenflow", **ARGUMENTS
            ),
            train_dataset=Tokens(24),
            eval_dataset=Tokens(8),
            optimizer_cls_and_kwargs=options and (zf.ZenFlowAdamW, options),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.predict(Tokens(4))
        trainer.train()
        runs.append(Run(trainer, weights(trainer.model), {}))
        losses.append([before, trainer.evaluate()["eval_loss"]])
    assert_equal_runs(runs[1], runs[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][0] != losses[1][1]


@pytest.mark.parametrize("entry", ENTRIES)
def test_model_is_cast_after_training(entry: str, tmp_path: Path) -> None:
    """``bf16_full_eval`` casts the model in the first evaluation after ``train()``."""
    callbacks = [ZenFlowCallback()]
    run = train(entry, EXACT, callbacks=callbacks, folder=tmp_path, bf16_full_eval=True)
    expected = {name: value.bfloat16() for name, value in run.weights.items()}
    metrics = run.trainer.evaluate()
    reference = train("eager", None, bf16_full_eval=True).trainer
    assert metrics["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], rel=1e-3)
    assert run.trainer.predict(Tokens(8)).metrics["test_loss"] == metrics["eval_loss"]  # type: ignore[arg-type, index]
    run.trainer.save_model(str(tmp_path / "half"))
    saved = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    with pytest.raises(RuntimeError, match="at the optimizer's first use and is bfloat16"):
        run.trainer.train()


def test_train_twice() -> None:
    """The Trainer keeps optimizer and state from one train() to the next."""
    found = []
    for options in (None, EXACT):
        run = train("compiled" if options else "eager", options)
        run.trainer.train()
        found.append(Run(run.trainer, weights(run.trainer.model), {}))
    assert_equal_runs(found[1], found[0])
    assert difference(found[1].weights, adamw().weights) > 1e-3


def test_model_init_makes_models_anew() -> None:
    """Each train() has another model and optimizer, as in ``hyperparameter_search``."""
    found: list[list[dict[str, Tensor]]] = [[], []]
    for options, trained in zip((None, EXACT), found, strict=True):
        trainer = Trainer(
            model_init=lambda trial=None: model_of(),
            args=TrainingArguments(output_dir=output_folder(), **ARGUMENTS),
            train_dataset=Tokens(24),
            optimizer_cls_and_kwargs=options and (zf.ZenFlowAdamW, options),
        )
        for _ in range(2):
            trainer.train()
            trained.append(weights(trainer.model))
    for ours, theirs in zip(*found, strict=True):
        assert_trained(weights(model_of()), ours)
        assert difference(ours, theirs) <= 1e-5


def test_collected_trainer_releases_everything() -> None:
    """The Trainer calls no close(): threads end and host memory is freed when it is collected."""
    before = {thread for thread in threading.enumerate() if "zenflow" in thread.name}
    run = train("eager", WINDOWED, callbacks=[ZenFlowCallback()])
    engine, model = weakref.ref(run.optimizer.engine), run.trainer.model
    started = {thread for thread in threading.enumerate() if "zenflow" in thread.name} - before
    assert started
    del run
    gc.collect()
    assert engine() is None
    assert not any(thread.is_alive() for thread in started)
    zf.ZenFlowAdamW(model.parameters(), **WINDOWED).close()  # the parameters have no owner


def another_trainer(model: nn.Module) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=output_folder(), **{**ARGUMENTS, "max_steps": 1}),
        train_dataset=Tokens(24),
        optimizer_cls_and_kwargs=(zf.ZenFlowAdamW, WINDOWED),
    )


def test_second_trainer_takes_over() -> None:
    """The earlier Trainer stays alive under its name, as in a notebook."""
    first = another_trainer(model_of())
    first.train()
    second = another_trainer(first.model)
    with pytest.warns(UserWarning, match="takes over parameters of an earlier one"):
        second.train()
    assert offloaded(second.optimizer.optimizer)
    with pytest.raises(RuntimeError, match="another one, created later, has taken"):
        first.optimizer.optimizer.step()


def test_earlier_trainer_in_a_cycle_owns_nothing() -> None:
    gc.disable()  # otherwise it could collect the first one by chance
    try:
        model = model_of()
        first = another_trainer(model)
        first.train()
        first.myself = first
        optimizer = weakref.ref(first.optimizer.optimizer)
        del first
        assert optimizer() is not None
        second = another_trainer(model)
        second.create_optimizer()
    finally:
        gc.enable()
    assert optimizer() is None


def test_norm_of_a_large_gradient() -> None:
    """The exact norm is the reference: torch's own norm of so many elements is off by 1e-5 on a CPU."""
    torch.manual_seed(0)
    layer, batch = nn.Linear(1024, 1024, bias=False), torch.randn(16, 1024)
    layer(batch).square().mean().backward()
    exact = layer.weight.grad.double().norm().item()  # type: ignore[union-attr]
    layer.zero_grad()
    optimizer = zf.ZenFlowAdamW(layer.parameters(), update_interval=1)
    layer(batch).square().mean().backward()
    logged = Accelerator(cpu=True).clip_grad_norm_(layer.parameters(), 1.0)
    assert offloaded(optimizer)
    assert float(logged) == pytest.approx(exact, rel=1e-6)
    optimizer.close()


# The name of the backend in Accelerate.


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes enums like Accelerate's, which the tests of this process extend only once."""

    def make(*names: str) -> Any:
        made = BaseEnum("Backends", {name: name for name in names}, type=str)  # type: ignore[call-overload]
        monkeypatch.setattr(adapter, "DynamoBackend", made)
        return made

    return make


def test_register_backend_adds_a_member(backends: Callable[..., Any]) -> None:
    enum = backends("NO", "INDUCTOR")
    assert "ZENFLOW" not in enum
    with pytest.raises(ValueError, match="not a valid"):
        enum("ZENFLOW")
    register_backend()
    register_backend()
    member = enum("ZENFLOW")
    assert member is enum.ZENFLOW is enum["ZENFLOW"]
    assert list(enum) == [enum.NO, enum.INDUCTOR, member]
    assert enum.list() == ["NO", "INDUCTOR", "ZENFLOW"]
    assert len(enum) == 3
    assert "ZENFLOW" in enum
    assert "NONSENSE" not in enum
    assert (str(member), member.value, member.name, member.lower()) == ("ZENFLOW", "ZENFLOW", "ZENFLOW", "zenflow")
    assert repr(member) == "<Backends.ZENFLOW: 'ZENFLOW'>"
    assert {member: 1}["ZENFLOW"] == 1


def test_register_backend_keeps_accelerates_own(backends: Callable[..., Any]) -> None:
    enum = backends("NO", "ZENFLOW", "INDUCTOR")
    theirs = enum.ZENFLOW
    register_backend()
    assert list(enum) == [enum.NO, theirs, enum.INDUCTOR]
    assert enum.ZENFLOW is theirs


def test_registered_name_survives_copies_and_files(tmp_path: Path) -> None:
    register_backend()
    member = DynamoBackend("ZENFLOW")
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is copy.copy(member) is member
    assert json.loads(json.dumps({"backend": member})) == {"backend": "ZENFLOW"}
    plugin = TorchDynamoPlugin(backend="zenflow", options={"lr": 1e-3})
    assert pickle.loads(pickle.dumps(plugin)) == copy.deepcopy(plugin) == plugin
    assert plugin.to_kwargs() == {"backend": "zenflow", "options": {"lr": 1e-3}}
    arguments = TrainingArguments(output_dir=str(tmp_path), torch_compile_backend="zenflow", **ARGUMENTS)
    torch.save(arguments, tmp_path / "training_args.bin")
    read = torch.load(tmp_path / "training_args.bin", weights_only=False)
    for each in (copy.deepcopy(arguments), read):
        assert each.to_dict() == arguments.to_dict()
        assert each.torch_compile_backend == "zenflow"
    assert json.loads(arguments.to_json_string())["torch_compile_backend"] == "zenflow"


@pytest.mark.parametrize("regional", [False, True])
def test_accelerator_compiles_with_the_plugin(regional: bool) -> None:
    """``compile_regions`` makes a new module around the same parameters, with a compiled block each."""
    register_backend()
    plugin = TorchDynamoPlugin(backend="zenflow", options={"inner": "eager"}, use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model, reference = tiny_llama(), tiny_llama()
    ours = zf.ZenFlowAdamW(model.parameters(), **EXACT)
    theirs = torch.optim.AdamW(reference.parameters(), **ADAM)
    prepared, optimizer = accelerator.prepare(model, ours)
    for tokens in Tokens(4).tokens:
        batch = {"input_ids": tokens[None], "labels": tokens[None]}
        accelerator.backward(prepared(**batch).loss)
        norm = accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reference(**batch).loss.backward()
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(reference.parameters(), 1.0)), rel=1e-6)
        theirs.step()
        theirs.zero_grad()
    assert offloaded(ours) > 0
    assert len(ours.engine.graphs) > 0
    assert difference(weights(model), weights(reference)) <= 1e-5


def test_backend_without_our_optimizer_warns() -> None:
    """``torch_compile_backend="zenflow"`` with the Trainer's AdamW: AdamW's numbers, and a warning."""
    with pytest.warns(UserWarning, match=r"offloads nothing here.*optimizer_cls_and_kwargs"):
        run = train("named", None)
    assert difference(run.weights, adamw().weights) <= 1e-5


# The last model.


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("entry", "strategy"), [("eager", "steps"), ("eager", "epoch"), ("compiled", "steps"), ("named", "steps")]
)
def test_last_checkpoint_holds_every_gradient(entry: str, strategy: str, tmp_path: Path) -> None:
    arguments = {"save_strategy": strategy, "save_steps": 2, "max_steps": -1, "num_train_epochs": 1}
    without = train(entry, WINDOWED, folder=tmp_path / "without", **arguments)
    run = train(entry, WINDOWED, folder=tmp_path / "with", callbacks=[ZenFlowCallback()], **arguments)
    last = run.trainer.state.global_step
    assert last % 4  # windows are open
    assert difference(run.saved(last), without.saved(last)) > 1e-4
    for each in (run, without):
        each.optimizer.close()
    closed = weights(run.trainer.model)
    assert_bitwise(closed, weights(without.trainer.model))
    assert_bitwise(run.saved(last), {name: closed[name] for name in run.saved(last)})
    assert run.logged("loss") == without.logged("loss")
    if strategy == "steps":  # checkpoints before the last one are those of a run without the callback
        assert_bitwise(run.saved(2), without.saved(2))
        states = [torch.load(tmp_path / each / "checkpoint-2" / "optimizer.pt") for each in ("with", "without")]
        assert_bitwise(_flat(states[0]), _flat(states[1]))


class StopAt(TrainerCallback):
    """Ends training after the evaluation of a step, as ``EarlyStoppingCallback`` does, or after the step."""

    def __init__(self, step: int, event: str) -> None:
        self.step = step
        setattr(self, event, self.stop)

    def stop(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("stop", [None, StopAt(6, "on_epoch_end")], ids=["max_steps", "late_stop"])
def test_model_after_training_holds_every_gradient(stop: StopAt | None, tmp_path: Path) -> None:
    """This also holds if a callback after ours ends training in the last event before on_train_end."""
    stops, steps = ([], 5) if stop is None else ([stop], 12)
    without = train("eager", WINDOWED, callbacks=stops, max_steps=steps)
    run = train("eager", WINDOWED, callbacks=[ZenFlowCallback(), *stops], max_steps=steps)
    run.trainer.save_model(str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert difference(saved, {name: without.weights[name] for name in saved}) > 1e-4
    without.optimizer.close()
    closed = weights(without.trainer.model)
    assert_bitwise(saved, {name: closed[name] for name in saved})


@pytest.mark.parametrize("event", ["on_evaluate", "on_step_end", "on_log"])
@pytest.mark.parametrize("last", [False, True], ids=["our_callback_first", "our_callback_last"])
def test_checkpoint_after_a_stop_holds_all(event: str, last: bool, tmp_path: Path) -> None:
    """The Trainer saves directly after the event that ended training, for any order of callbacks."""
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    stop = StopAt(3, event)
    without = train("eager", WINDOWED, callbacks=[stop], folder=tmp_path / "without", **arguments)
    callbacks = [stop, ZenFlowCallback()] if last else [ZenFlowCallback(), stop]
    run = train("eager", WINDOWED, callbacks=callbacks, folder=tmp_path / "with", **arguments)
    assert run.trainer.state.global_step == 3
    assert difference(run.saved(3), without.saved(3)) > 1e-4
    without.optimizer.close()
    closed = weights(without.trainer.model)
    assert_bitwise(run.saved(3), {name: closed[name] for name in run.saved(3)})


def test_early_stopping_loads_the_best_model(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The flush comes before the best model is loaded, and does not change it."""
    run = train(
        "eager",
        WINDOWED,
        callbacks=[ZenFlowCallback(), EarlyStoppingCallback(early_stopping_patience=1)],
        folder=tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        load_best_model_at_end=True,
        greater_is_better=True,  # the losses descend: the first model is the best one
        metric_for_best_model="eval_loss",
        max_steps=9,
    )
    assert run.trainer.state.global_step == 4
    assert_bitwise({name: run.weights[name] for name in run.saved(2)}, run.saved(2))
    run.optimizer.close()
    assert_bitwise(weights(run.trainer.model), run.weights)
    assert not [each for each in recwarn if "gradient" in str(each.message)]


class FlushAt(TrainerCallback):
    """Flushes in the middle of training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == self.step:
            keywords["optimizer"].optimizer.flush()


def test_resume_from_the_last_checkpoint(tmp_path: Path) -> None:
    """A longer run continues with empty update windows, as one that called flush() there."""
    arguments = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    train("eager", WINDOWED, callbacks=[ZenFlowCallback()], folder=tmp_path, max_steps=5, **arguments)
    resumed = train("eager", WINDOWED, resume=str(tmp_path / "checkpoint-5"), max_steps=9, **arguments)
    whole = train("eager", WINDOWED, callbacks=[FlushAt(5)], max_steps=9, **arguments)
    assert_bitwise(resumed.weights, whole.weights)
    never = train("eager", WINDOWED, max_steps=9, **arguments)
    assert difference(whole.weights, never.weights) > 1e-4


class Preempt(TrainerCallback):
    """A SIGTERM, without the signal and its grace period."""

    def __init__(self) -> None:
        self.manager: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == 3:
            self.manager.is_checkpoint_requested = True


def test_checkpoint_on_sigterm_keeps_windows(tmp_path: Path) -> None:
    class Preempted(Trainer):
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            jit = next(each for each in self.callback_handler.callbacks if hasattr(each, "jit_manager"))
            next(each for each in keywords["callbacks"] if isinstance(each, Preempt)).manager = jit.jit_manager

    train(
        "eager",
        WINDOWED,
        trainer=Preempted,
        callbacks=[ZenFlowCallback(), Preempt()],
        folder=tmp_path,
        enable_jit_checkpoint=True,
        max_steps=7,
    )
    resumed = train("eager", WINDOWED, resume=str(tmp_path / "checkpoint-3"), max_steps=7)
    assert_bitwise(resumed.weights, train("eager", WINDOWED, max_steps=7).weights)


def test_callback_without_our_optimizer() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a AdamW; pass\s+optimizer_cls_and_kwargs"):
        train("eager", None, callbacks=[ZenFlowCallback()])


def given(keywords: Mapping[str, Any], **arguments: Any) -> Trainer:
    """A Trainer that begins to train with these keywords of the optimizer, and the default arguments but for these."""
    names = ("learning_rate", "weight_decay", "adam_epsilon")
    defaults = {name: value for name, value in ARGUMENTS.items() if name not in names}
    trainer = Trainer(
        model=model_of(),
        args=TrainingArguments(output_dir=output_folder(), **{**defaults, "max_steps": 1, **arguments}),
        train_dataset=Tokens(24),
        optimizer_cls_and_kwargs=(zf.ZenFlowAdamW, dict(keywords)),
        callbacks=[ZenFlowCallback()],
    )
    trainer.train()
    return trainer


DECAY = r"weight_decay={} of the optimizer has no effect.*args\.weight_decay={}.*TrainingArguments\(weight_decay={}\)"
DEFAULT = r"was given no {} .* its default, {},.*TrainingArguments has {}.*pass optimizer_cls_and_kwargs="


@pytest.mark.tier1
@pytest.mark.parametrize(
    ("keywords", "arguments", "error"),
    [
        ({"lr": 2e-4, "weight_decay": 0.1}, {}, DECAY.format(0.1, 0.0, 0.1)),
        ({"lr": 2e-4, "weight_decay": 0.01}, {}, DECAY.format(0.01, 0.0, 0.01)),
        ({"lr": 2e-4, "weight_decay": 0.0}, {"weight_decay": 0.1}, DECAY.format("0.0", 0.1, "0.0")),
        ({}, {}, DEFAULT.format("lr", "0.001", "learning_rate=5e-05")),
        ({}, {"warmup_steps": 1}, DEFAULT.format("lr", "0.001", "learning_rate=5e-05")),
        ({"lr": 2e-4}, {"adam_beta2": 0.95}, DEFAULT.format("betas", r"\(0.9, 0.999\)", ".*0.95")),
        ({"lr": 2e-4}, {"adam_epsilon": 1e-6}, DEFAULT.format("eps", "1e-08", "adam_epsilon=1e-06")),
    ],
)
def test_silent_hyperparameters_raise(keywords: dict[str, Any], arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        given(keywords, **arguments)


@pytest.mark.parametrize(
    ("keywords", "arguments", "decay"),
    [
        ({"lr": 1e-3}, {}, 0.0),
        ({"lr": 2e-4}, {"weight_decay": 0.1}, 0.1),
        ({"lr": 2e-4, "weight_decay": 0.1}, {"weight_decay": 0.1}, 0.1),
        ({}, {"learning_rate": 1e-3}, 0.0),
    ],
)
def test_stated_hyperparameters_train(keywords: dict[str, Any], arguments: dict[str, Any], decay: float) -> None:
    groups = given(keywords, **arguments).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [decay, 0.0]
    assert {group["initial_lr"] for group in groups} == {keywords.get("lr", 1e-3)}


def test_groups_of_the_user_decide() -> None:
    """``optimizers=``: with groups of one's own, which the Trainer does not change."""
    model = model_of()
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "lr": 1e-4}, {"params": others, "lr": 1e-4, "weight_decay": 0.0}]
    optimizer = zf.ZenFlowAdamW(groups, weight_decay=0.1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=output_folder(), **{**ARGUMENTS, "adam_epsilon": 1e-8, "max_steps": 1}),
        train_dataset=Tokens(24),
        optimizers=(optimizer, None),
        callbacks=[ZenFlowCallback()],
    )
    trainer.train()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_callback_is_used_again_and_leaves_no_hook() -> None:
    callback = ZenFlowCallback()
    copies = []

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            copies.append(copy.deepcopy(keywords["model"]))
            pickle.dumps(keywords["model"])
            if len(copies) == 2:
                raise OSError("stopped by the test")

    with pytest.raises(OSError, match="stopped by the test"):
        train("eager", WINDOWED, callbacks=[callback, Fails()])
    copies[0].state_dict()
    run = train("eager", WINDOWED, callbacks=[callback])
    reference = train("eager", WINDOWED)
    reference.optimizer.close()
    assert_bitwise(run.weights, weights(reference.trainer.model))
    hooks = run.trainer.model._state_dict_pre_hooks.values()
    assert not any("integrations" in type(hook).__module__ for hook in hooks)


# Unsupported uses.


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """The environment of ``torchrun`` with one process, and any port that is free."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with mock.patch.dict(os.environ, {**address, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_model_wrapped_by_torch_compile_gets_no_batch() -> None:
    """The Trainer drops all columns, as the wrapper's signature names none; the same with any backend."""
    trainer = Trainer(
        model=torch.compile(model_of(), backend="eager"),
        args=TrainingArguments(output_dir=output_folder(), **ARGUMENTS),
        train_dataset=Tokens(24),
    )
    with pytest.raises(ValueError, match="batch received was empty"):
        trainer.train()


def test_trainer_optimizer_names_are_a_closed_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ``register_optimizer`` opens for a process, as other tests in this one may have done."""
    monkeypatch.delitem(OptimizerNames._value2member_map_, "zenflow", raising=False)
    with pytest.raises(ValueError, match="zenflow is not a valid OptimizerNames"):
        TrainingArguments(output_dir=str(tmp_path), **{**ARGUMENTS, "optim": "zenflow"})


@pytest.mark.usefixtures("one_process_group")
def test_ddp_of_a_compiled_model_is_refused() -> None:
    with pytest.raises(Exception, match=r"wrapped in DistributedDataParallel.*or train under DistributedData"):
        train("compiled", EXACT, ddp_backend="gloo")


class ReplicatesByHand(nn.Module):
    """``nn.DataParallel`` on one device: every half of a batch runs on a replica with copied parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        halves = []
        for half in range(2):
            part = {name: value.chunk(2)[half] if value.dim() else value for name, value in inputs.items()}
            halves.append(self._replica(self.module)(**part).loss.reshape(()))
        return {"loss": torch.stack(halves)}

    def _replica(self, module: nn.Module) -> Any:
        replica = module._replicate_for_data_parallel()  # type: ignore[operator]
        for name, param in module._parameters.items():
            setattr(replica, name, None if param is None else param.clone())
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else self._replica(child)
        return replica


@mock.patch.object(nn, "DataParallel", ReplicatesByHand)
@mock.patch.object(TrainingArguments, "n_gpu", property(lambda self: 2))
def test_data_parallel_replicas() -> None:
    """The Trainer uses ``nn.DataParallel`` for several GPUs in one process, and compiles nothing then."""
    reference = train("eager", None, per_device_train_batch_size=2)
    run = train("named", EXACT, per_device_train_batch_size=2)
    assert isinstance(run.trainer.model_wrapped, ReplicatesByHand)
    assert_equal_runs(run, reference)
