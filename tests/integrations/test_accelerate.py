"""Accelerate: loops with ``prepare``, ``accumulate``, clipping and ``save_state``, with the optimizer unchanged."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, GradScalerKwargs
from accelerate.local_sgd import LocalSGD
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    WINDOWED,
    Numbers,
    Tokens,
    assert_as_adamw,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    forget_accelerate,
    nudge,
    offloaded,
    open_gradients,
    spread,
    tiny_llama,
    weights,
)
from tests.support.training import take_step
from zenflow_compile.integrations.accelerate import register_backend

ENTRIES = ["eager", "model.compile", "torch.compile"]
CLIPS: list[tuple[str, float] | None] = [None, ("norm", 0.5), ("value", 0.01)]
CLIP_IDS = ["unclipped", "norm", "value"]
MATRICES = 16  # of 21 parameters; the others are norms' weights
STEPS = 6


@pytest.fixture(autouse=True)
def accelerate_remembers_no_loader() -> Iterator[None]:
    yield
    gc.collect()  # AcceleratedOptimizers and loaders are in cycles


@dataclass
class Run:
    """The compared results of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Any = None


def accelerator_of(precision: str = "no", accumulate: int = 1, **keywords: Any) -> Accelerator:
    """A new Accelerator on the CPU, without the settings of earlier ones."""
    forget_accelerate()
    return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate, **keywords)


def loader_of(steps: int = STEPS) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Tokens(4 * steps), batch_size=4)


def entered(model: nn.Module, entry: str) -> Any:
    """The model as it is passed to ``prepare``."""
    if entry == "torch.compile":
        return torch.compile(model, **EAGER_BACKEND)
    if entry == "model.compile":
        model.compile(**EAGER_BACKEND)
    return model


def train(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    entry: str = "eager",
    clip: tuple[str, float] | None = None,
    accumulate: int = 1,
    precision: str = "no",
    reverse: bool = False,
    bad: int | None = None,
) -> Run:
    """Train in the loop of Accelerate's documentation. The gradients of batch ``bad`` are infinite."""
    accelerator = accelerator_of(precision, accumulate)
    if precision == "fp16":
        # Accelerate makes a scaler on accelerators only; this does the same on the CPU.
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=256.0), True
    model, run = tiny_llama(), Run()
    run.before, run.optimizer = weights(model), make(model)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, STEPS)
    loader: Any = loader_of()
    prepared: Any = entered(model, entry)
    optimizer: Any = run.optimizer
    if reverse:
        scheduler, loader, optimizer, prepared = accelerator.prepare(scheduler, loader, optimizer, prepared)
    else:
        prepared, optimizer, loader, scheduler = accelerator.prepare(prepared, optimizer, loader, scheduler)
    for index, batch in enumerate(loader):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            run.losses.append(float(loss.detach()))
            accelerator.backward(loss * torch.inf if index == bad else loss)
            if accelerator.sync_gradients and clip is not None:
                kind, limit = clip
                if kind == "norm":
                    run.norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), limit)))
                else:
                    accelerator.clip_grad_value_(prepared.parameters(), limit)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.skipped.append(optimizer.step_was_skipped)
            run.scales.append(1.0 if accelerator.scaler is None else accelerator.scaler.get_scale())
    run.after = weights(accelerator.unwrap_model(prepared, keep_torch_compile=False))
    return run


def zenflow(model: nn.Module) -> zf.ZenFlowAdamW:
    return zf.ZenFlowAdamW(model.named_parameters(), **EXACT)


def nudged(model: nn.Module, towards: float) -> torch.optim.Optimizer:
    """AdamW over weights that differ in the last place."""
    nudge(model, towards)
    return torch.optim.AdamW(model.parameters(), **ADAM)


@cache
def references(
    clip: tuple[str, float] | None = None, accumulate: int = 1, precision: str = "no", bad: int | None = None
) -> list[Run]:
    """The same loop under AdamW and its variants."""
    variants: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
        lambda model: torch.optim.AdamW(model.parameters(), **ADAM),
        lambda model: torch.optim.AdamW(model.parameters(), **ADAM, fused=True),
    ]
    if precision != "no":
        variants += [partial(nudged, towards=torch.inf), partial(nudged, towards=-torch.inf)]
    return [train(make, clip=clip, accumulate=accumulate, precision=precision, bad=bad) for make in variants]


def assert_equal_runs(run: Run, expected: Run, *variants: Run) -> None:
    assert_trained(run.before, run.after)
    assert_as_adamw(
        *(Numbers(each.after, {"losses": each.losses, "norms": each.norms}) for each in (run, expected, *variants))
    )
    assert run.skipped == expected.skipped
    assert run.scales == expected.scales


def check(entry: str, clip: tuple[str, float] | None, accumulate: int, precision: str, bad: int | None = None) -> None:
    with zf.profile() as profile:
        run = train(zenflow, entry=entry, clip=clip, accumulate=accumulate, precision=precision, bad=bad)
    expected = references(clip, accumulate, precision, bad)
    assert_equal_runs(run, *expected)
    if clip is not None and clip[0] == "norm":
        assert min(norm for norm in expected[0].norms if norm == norm) > clip[1], "nothing was clipped"
    assert offloaded(run.optimizer) == MATRICES
    assert bool(run.optimizer.engine.graphs) == (entry != "eager")
    # Norms and scaling need no gradient in memory. Clamping elements does: each matrix's, in each of the steps.
    expected_dense = MATRICES * STEPS // accumulate if clip is not None and clip[0] == "value" else 0
    assert sum(dense_gradients(profile).values()) == expected_dense


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", CLIPS, ids=CLIP_IDS)
def test_eager_loop(clip: tuple[str, float] | None, accumulate: int) -> None:
    check("eager", clip, accumulate, "no")


@pytest.mark.parametrize(
    ("entry", "clip"), [("model.compile", CLIPS[1]), ("torch.compile", CLIPS[2])], ids=["norm", "value"]
)
def test_compiled_loop(entry: str, clip: tuple[str, float] | None) -> None:
    check(entry, clip, 2, "no")


def test_fp16_skips_a_step() -> None:
    check("eager", ("norm", 0.5), 1, "fp16", bad=2)
    assert references(("norm", 0.5), 1, "fp16", 2)[0].skipped == [False, False, True, False, False, False]


@pytest.mark.long
@pytest.mark.parametrize(("precision", "bad"), [("no", None), ("bf16", None), ("fp16", None), ("fp16", 2)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", CLIPS, ids=CLIP_IDS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_loop_matrix(
    entry: str, clip: tuple[str, float] | None, accumulate: int, precision: str, bad: int | None
) -> None:
    check(entry, clip, accumulate, precision, bad)


@mock.patch.dict(EAGER_BACKEND, options={})
@pytest.mark.long
def test_inductor_loop() -> None:
    check("model.compile", ("norm", 0.5), 2, "bf16")


@pytest.mark.parametrize("entry", ["eager", pytest.param("model.compile", marks=pytest.mark.long)])
def test_order_of_prepare(entry: str) -> None:
    """Accelerate reads and loads the optimizer's state in ``prepare``, here before it is given the model."""
    run = train(zenflow, entry=entry, clip=("norm", 0.5), reverse=True)
    assert offloaded(run.optimizer) == MATRICES
    assert_equal_runs(run, *references(("norm", 0.5)))


def test_scaler_on_the_cpu_is_not_made() -> None:
    """GradScalerKwargs is for accelerators; ``train`` above sets the attribute that Accelerate sets there."""
    assert accelerator_of("fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)]).scaler is None


def test_model_cast_after_prepare() -> None:
    """``prepare`` is the optimizer's first use. State is allocated again for the cast model when training begins."""

    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Tensor]:
        accelerator, model = accelerator_of(), tiny_llama()
        optimizer = accelerator.prepare(make(model))
        model.double()
        prepared, loader = accelerator.prepare(model, loader_of())
        for batch in loader:
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    after = run(zenflow)
    expected = run(lambda model: torch.optim.AdamW(model.parameters(), **ADAM))
    assert {value.dtype for value in after.values()} == {torch.float64}
    assert difference(after, expected) < 1e-5


def test_prepare_without_device_placement() -> None:
    """The optimizer's state is not copied to the device and back: ``prepare`` is no first use."""
    accelerator, model = accelerator_of(), tiny_llama()
    optimizer = zenflow(model)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader_of(), device_placement=[True, False, True])
    assert optimizer._lazy_engine.built is None
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        wrapped.step()
        wrapped.zero_grad()
    accelerator_of()
    other = tiny_llama()
    adam = torch.optim.AdamW(other.parameters(), **ADAM)
    for batch in loader_of():
        take_step(other(**batch).loss, adam)
    assert difference(weights(model), weights(other)) < 1e-5


class Counter:
    """A custom object of a checkpoint."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def resumable(options: dict[str, Any], entry: str) -> tuple[Accelerator, Any, Any, Any, Any, Counter]:
    accelerator = accelerator_of(accumulate=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, counter = tiny_llama(attention_dropout=0.2), Counter()  # random numbers are part of what is restored
    optimizer = zf.ZenFlowAdamW(model.named_parameters(), **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    loader = DataLoader(Tokens(64), batch_size=4)
    prepared = accelerator.prepare(entered(model, entry), optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(counter)
    return accelerator, *prepared, counter


def run_batches(parts: tuple[Accelerator, Any, Any, Any, Any, Counter], batches: Any) -> list[float]:
    accelerator, model, optimizer, _, scheduler, counter = parts
    norms = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        counter.batches += 1
    return norms


def check_resume(options: dict[str, Any], entry: str, folder: Path) -> None:
    parts = resumable(options, entry)
    batches = list(parts[3])
    run_batches(parts, batches[:10])  # five optimizer steps: the second update window of four has one gradient
    if options["update_interval"] > 1:
        assert open_gradients(parts[2].state_dict()) > 0
    parts[0].save_state(str(folder))
    uninterrupted_norms = run_batches(parts, batches[10:])
    expected = weights(parts[0].unwrap_model(parts[1], keep_torch_compile=False))

    torch._dynamo.reset()
    resumed = resumable(options, entry)
    list(resumed[3])  # as many draws of the loader's generator
    resumed[0].load_state(str(folder))
    assert resumed[5].batches == 10
    assert resumed[4].get_last_lr() != [ADAM["lr"]]
    norms = run_batches(resumed, batches[10:])
    assert norms == uninterrupted_norms
    assert_bitwise(weights(resumed[0].unwrap_model(resumed[1], keep_torch_compile=False)), expected)
    assert offloaded(resumed[2].optimizer) == MATRICES


@pytest.mark.parametrize("options", [EXACT, WINDOWED], ids=["S1", "S4"])
def test_resume_in_a_window(options: dict[str, Any], tmp_path: Path) -> None:
    check_resume(options, "eager", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("entry", ["model.compile", "torch.compile"])
@pytest.mark.parametrize("options", [EXACT, WINDOWED], ids=["S1", "S4"])
def test_compiled_resume_in_a_window(options: dict[str, Any], entry: str, tmp_path: Path) -> None:
    check_resume(options, entry, tmp_path)


@pytest.mark.parametrize("release", ["free_memory", "clear"])
def test_memory_is_freed_between_trainings(release: str) -> None:
    accelerator, model = accelerator_of(), tiny_llama()
    optimizer: Any = zenflow(model)
    collected = weakref.ref(optimizer)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(2))
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    prepared, optimizer, loader = getattr(accelerator, release)(prepared, optimizer, loader)
    assert collected() is None
    before = weights(model)
    prepared, optimizer, loader = accelerator.prepare(model, zenflow(model), loader_of(2))
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_trained(before, weights(model))


def test_saved_models_are_current(tmp_path: Path) -> None:
    """``get_state_dict`` and ``save_model`` of a compiled model directly after ``step()``."""
    from safetensors.torch import load_file

    accelerator, model = accelerator_of(), tiny_llama(tie_word_embeddings=False)
    prepared, optimizer, loader = accelerator.prepare(entered(model, "model.compile"), zenflow(model), loader_of())
    saved = []
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if len(saved) < 2:
            accelerator.save_model(prepared, str(tmp_path / str(len(saved))))
        saved.append({name: value.clone() for name, value in accelerator.get_state_dict(prepared).items()})
    other = tiny_llama(tie_word_embeddings=False)
    adam = torch.optim.AdamW(other.parameters(), **ADAM)
    for batch, mine in zip(loader_of(), saved, strict=True):
        take_step(other(**batch).loss, adam)
        assert difference(mine, weights(other)) < 1e-5
    for number in range(2):
        assert_bitwise(load_file(tmp_path / str(number) / "model.safetensors"), saved[number])


def test_last_model_is_flushed() -> None:
    """The wrapper has no ``flush``: the optimizer that was given to ``prepare`` has, and is ``optimizer.optimizer``."""
    accelerator, model = accelerator_of(), tiny_llama()
    prepared, optimizer, loader = accelerator.prepare(
        model, zf.ZenFlowAdamW(model.named_parameters(), **WINDOWED), loader_of(5)
    )
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    before = weights(model)
    optimizer.optimizer.flush()
    after = weights(accelerator.unwrap_model(prepared))
    assert difference(before, after) > 1e-4  # the gradients in the open update window
    optimizer.optimizer.flush()
    assert_bitwise(weights(model), after)


def test_two_models_with_optimizers_of_their_own() -> None:
    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[list[dict[str, Tensor]], list[float]]:
        accelerator, models = accelerator_of(accumulate=2), [tiny_llama(), tiny_llama(num_hidden_layers=1)]
        one, two, first, second, loader = accelerator.prepare(*models, *map(make, models), loader_of())
        norms = []
        for batch in loader:
            with accelerator.accumulate(one, two):
                with torch.no_grad():
                    target = two(**batch).logits.softmax(-1)
                logits = one(**batch).logits
                accelerator.backward((logits - target).square().mean() + two(**batch).loss)
                if accelerator.sync_gradients:
                    norms += [float(accelerator.clip_grad_norm_(each.parameters(), 0.05)) for each in (one, two)]
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        return [weights(each) for each in models], norms

    mine, my_norms = run(zenflow)
    theirs, their_norms = run(lambda model: torch.optim.AdamW(model.parameters(), **ADAM))
    assert max(difference(one, other) for one, other in zip(mine, theirs, strict=True)) < 1e-5
    torch.testing.assert_close(torch.tensor(my_norms), torch.tensor(their_norms), rtol=1e-6, atol=0)


def test_autocast_context_and_local_sgd() -> None:
    """``autocast()`` around a model that was not prepared; LocalSGD does nothing in one process."""

    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Tensor]:
        accelerator, model = accelerator_of("bf16"), tiny_llama()
        optimizer, loader = accelerator.prepare(make(model), loader_of())
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
            for batch in loader:
                with accelerator.autocast():
                    loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        return weights(model)

    expected = run(lambda model: torch.optim.AdamW(model.parameters(), **ADAM))
    # Half precision makes more of a difference in the last place, as in ``references``.
    variants = [run(partial(nudged, towards=towards)) for towards in (torch.inf, -torch.inf)]
    assert difference(run(zenflow), expected) <= max(1e-5, spread([expected, *variants]))


# Unsupported uses.


def test_launcher_does_not_know_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher checks names in a separate process."""
    from accelerate.commands.launch import launch_command_parser

    register_backend()
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args(["--dynamo_backend", "zenflow", "train.py"])
    assert re.search(r"--dynamo.backend: invalid choice: 'zenflow'", capsys.readouterr().err)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**next(iter(loader_of(1)))).loss.backward()
    optimizer.step()


def test_optimizer_of_a_cpu_offloaded_model() -> None:
    model = tiny_llama()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="meta device; materialise the model"):
        zenflow(model)


@pytest.mark.parametrize("entry", ["eager", pytest.param("model.compile", marks=pytest.mark.long)])
@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_model_offloaded_after_the_optimizer(offload: str, entry: str, tmp_path: Path) -> None:
    """PyTorch's optimizers say nothing, and train nothing."""
    model = tiny_llama()
    optimizer = zenflow(model)
    arguments: dict[str, Any] = {"execution_device": torch.device("cpu")}
    getattr(accelerate, offload)(model, **arguments, **({"offload_dir": tmp_path} if offload == "disk_offload" else {}))
    with pytest.warns(UserWarning, match="no parameter of this optimizer has had a gradient.*cpu_offload.*leave"):
        step_once(entered(model, entry), optimizer)


def test_model_offloaded_in_mid_training() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = zenflow(model)
    compiled = torch.compile(model, **EAGER_BACKEND)
    take_step(compiled(torch.ones(2, 16)).sum(), optimizer)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"holds another parameter in the place of 0\.weight.*create it anew"):
        compiled(torch.ones(2, 16))


def test_dispatched_model_on_one_device() -> None:
    model = accelerate.dispatch_model(tiny_llama(), {"": "cpu"})
    before, optimizer = weights(model), zenflow(model)
    step_once(model, optimizer)
    assert_trained(before, weights(model))
    assert offloaded(optimizer) == MATRICES
