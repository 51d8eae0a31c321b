"""TRL: supervised fine-tuning, preferences and GRPO, with the optimizer unchanged and the trainers' defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import zenflow_compile as zf
from tests.integrations.compare import (
    ADAM,
    EAGER_BACKEND,
    EXACT,
    VOCABULARY,
    WINDOWED,
    Tokens,
    assert_bitwise,
    assert_trained,
    dense_gradients,
    difference,
    forget_accelerate,
    offloaded,
    open_gradients,
    tiny_llama,
    weights,
)
from zenflow_compile.integrations.transformers import ZenFlowCallback

datasets.disable_progress_bars()

ADAMW: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, ADAM)
ZENFLOW: tuple[Any, dict[str, Any]] = (zf.ZenFlowAdamW, EXACT)
STEPS = 4


def tokenizer() -> Any:
    """One token per word: w0, w1, ..."""
    special = ["<pad>", "<eos>", "<unk>"]
    words = {word: index for index, word in enumerate(special + [f"w{i}" for i in range(VOCABULARY - len(special))])}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed: int, count: int) -> str:
    return " ".join(f"w{(seed * 7 + 3 * j * j + j) % (VOCABULARY - 3)}" for j in range(count))


def reward(completions: list[str], **others: Any) -> list[float]:
    """Many different words are rewarded."""
    return [float(len(set(completion.split()))) for completion in completions]


ROWS = range(16)
TEXTS = {"text": [text(i, 6 + i % 7) for i in ROWS]}
TOKENS = {"input_ids": Tokens(len(ROWS)).tokens.tolist()}
COMPLETIONS = {"prompt": [text(i, 4) for i in ROWS], "completion": [" " + text(i + 9, 3 + i % 4) for i in ROWS]}
PREFERENCES = {
    "prompt": COMPLETIONS["prompt"],
    "chosen": [" " + text(i + 9, 4) for i in ROWS],
    "rejected": [" " + text(i + 5, 4) for i in ROWS],
}
PROMPTS = {"prompt": COMPLETIONS["prompt"]}


@dataclass(frozen=True)
class Case:
    """A trainer, its data and its configuration.

    Attributes:
        reference: DPO is given another model to compare with.
        lora: adapters are trained.
        matrices: how many parameters are offloaded.
    """

    trainer: Any
    configuration: Any
    data: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    reference: bool = False
    lora: bool = False

    @property
    def matrices(self) -> int:
        return 8 if self.lora else 16


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
CLIPPED = {"max_grad_norm": 0.25}
SYNCHRONIZED = {**CLIPPED, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
SAMPLED = {"num_generations": 4, "max_completion_length": 6, "max_grad_norm": 0.1}
CASES = {
    "sft": Case(SFTTrainer, SFTConfig, TEXTS),
    "sft_tokens_accumulated": Case(SFTTrainer, SFTConfig, TOKENS, ACCUMULATED),
    "sft_lora": Case(SFTTrainer, SFTConfig, TEXTS, {"max_grad_norm": 0.005}, lora=True),
    "sft_checkpointing": Case(SFTTrainer, SFTConfig, TEXTS, {"gradient_checkpointing": True}),
    "sft_packing": Case(SFTTrainer, SFTConfig, TEXTS, {"packing": True, "max_length": 16}),
    "sft_completions": Case(SFTTrainer, SFTConfig, COMPLETIONS, {"completion_only_loss": True}),
    "dpo_reference": Case(DPOTrainer, DPOConfig, PREFERENCES, CLIPPED, reference=True),
    "dpo_precomputed": Case(DPOTrainer, DPOConfig, PREFERENCES, {**CLIPPED, "precompute_ref_log_probs": True}),
    "dpo_lora": Case(DPOTrainer, DPOConfig, PREFERENCES, {"max_grad_norm": 0.002}, lora=True),
    "dpo_synchronized": Case(DPOTrainer, DPOConfig, PREFERENCES, SYNCHRONIZED, reference=True),
    "grpo": Case(GRPOTrainer, GRPOConfig, PROMPTS, SAMPLED),
    "grpo_lora": Case(GRPOTrainer, GRPOConfig, PROMPTS, {**SAMPLED, "beta": 0.1, "max_grad_norm": 0.005}, lora=True),
}


@dataclass
class Run:
    """The compared results of a run."""

    logs: list[dict[str, float]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    trainer: Any


def trainer_of(
    case: Case, optimizer: tuple[Any, dict[str, Any]], folder: Path, *, compiled: bool = False, **changes: Any
) -> Any:
    """A new trainer; the process's settings of earlier ones are cleared."""
    forget_accelerate()
    model = tiny_llama()
    if compiled:
        model.compile(**EAGER_BACKEND)
    configuration = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "weight_decay": ADAM["weight_decay"],
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    keywords: dict[str, Any] = {}
    if case.reference:
        keywords["ref_model"] = tiny_llama()
    if case.lora:
        keywords["peft_config"] = LoraConfig(
            r=64, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
        )
    if case.trainer is GRPOTrainer:
        keywords["reward_funcs"] = reward
    if case.trainer is SFTTrainer:
        keywords["optimizer_cls_and_kwargs"] = optimizer
    torch.manual_seed(4)
    trainer = case.trainer(
        model=model,
        args=case.configuration(**{**configuration, **case.changes, **changes}),
        train_dataset=Dataset.from_dict(case.data),
        processing_class=tokenizer(),
        **keywords,
    )
    trainer.optimizer_cls_and_kwargs = optimizer  # the other trainers have no argument for it
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "reward", "kl", "rewards/margins", "rewards/chosen", "logps/chosen", "entropy")
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [{name: float(entry[name]) for name in names if name in entry} for entry in entries]


def train(case: Case, optimizer: tuple[Any, dict[str, Any]], folder: Path, *, compiled: bool = False) -> Run:
    trainer = trainer_of(case, optimizer, folder, compiled=compiled)
    trained = {name for name, param in trainer.model.named_parameters() if param.requires_grad}
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    frozen = [name for name in before if name not in trained and not (name == "lm_head.weight" and not case.lora)]
    assert_bitwise({name: before[name] for name in frozen}, {name: after[name] for name in frozen})
    return Run(
        logged(trainer), {name: before[name] for name in trained}, {name: after[name] for name in trained}, trainer
    )


@cache
def reference(name: str, folder: Path) -> Run:
    return train(CASES[name], ADAMW, folder)


def check(name: str, folder: Path, *, compiled: bool) -> None:
    case = CASES[name]
    with zf.profile() as profile:
        run = train(case, ZENFLOW, folder, compiled=compiled)
    expected = reference(name, folder.parent)
    assert_trained(run.before, run.after)
    assert difference(run.after, expected.after) < 1e-5
    assert len(run.logs) == STEPS
    for mine, theirs in zip(run.logs, expected.logs, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            # Differences of log probabilities, of some tens, are compared on the scale of these.
            atol = 1e-5 if "rewards" in key or key == "kl" else 1e-7
            assert mine[key] == pytest.approx(value, rel=1e-6, abs=atol), key
    clipped = [entry["grad_norm"] > run.trainer.args.max_grad_norm for entry in expected.logs]
    assert any(clipped), "nothing was clipped"
    assert dense_gradients(profile) == {}  # these trainers clip by the norm, which scales gradients
    engine = run.trainer.optimizer.optimizer.engine
    assert (offloaded(run.trainer.optimizer.optimizer), engine.step) == (case.matrices, STEPS)
    assert bool(engine.graphs) == compiled


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", CASES)
def test_trainer(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, compiled=False)


@pytest.mark.parametrize("name", ["sft_tokens_accumulated"])
def test_compiled_trainer(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, compiled=True)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name != "sft_tokens_accumulated"])
def test_compiled_matrix(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, compiled=True)


@mock.patch.dict(EAGER_BACKEND, options={})
@pytest.mark.long
def test_inductor_trainer(tmp_path: Path) -> None:
    check("sft_tokens_accumulated", tmp_path, compiled=True)


def test_grpo_with_an_optimizer_object(tmp_path: Path) -> None:
    """``optimizers=`` is the other way in; samples are those of the weights after each step."""

    def run(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[list[Any], dict[str, Tensor]]:
        trainer = trainer_of(CASES["grpo"], ADAMW, tmp_path)
        trainer.optimizer_cls_and_kwargs = None
        trainer.optimizer = make(trainer.model)
        samples: list[Any] = []
        generate = trainer.model.generate

        def recorded(*args: Any, **keywords: Any) -> Any:
            result = generate(*args, **keywords)
            samples.append(result.clone())
            return result

        trainer.model.generate = recorded
        trainer.train()
        return samples, weights(trainer.model)

    samples, mine = run(lambda model: zf.ZenFlowAdamW(model.named_parameters(), **EXACT))
    expected_samples, theirs = run(lambda model: torch.optim.AdamW(model.parameters(), **ADAM))
    assert difference(mine, theirs) < 1e-5
    assert len(samples) >= 2
    assert all(torch.equal(one, other) for one, other in zip(samples, expected_samples, strict=True))


def test_state_stays_on_the_host(tmp_path: Path) -> None:
    """By default Accelerate copies a prepared optimizer's state to the device and back; the trainer must not."""
    save = zf.ZenFlowAdamW.state_dict
    with mock.patch.object(zf.ZenFlowAdamW, "state_dict", autospec=True, side_effect=save) as saved:
        trainer = trainer_of(CASES["sft"], ZENFLOW, tmp_path)
        trainer.accelerator.device_placement = False
        trainer.train()
        assert not saved.called
        expected = weights(train(CASES["sft"], ADAMW, tmp_path).trainer.model)
        assert difference(weights(trainer.model), expected) < 1e-5
        trainer_of(CASES["sft"], ZENFLOW, tmp_path).train()
        assert saved.call_count == 1


class StopAt(TrainerCallback):
    """Ends a run early, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def check_resume(name: str, options: dict[str, Any], compiled: bool, folder: Path) -> None:
    """The checkpoint of step 3 of 6 has open update windows at S = 4."""
    optimizer = (zf.ZenFlowAdamW, options)
    keywords = {"compiled": compiled, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(CASES[name], optimizer, folder / "whole", **keywords)
    whole.train()
    begun = trainer_of(CASES[name], optimizer, folder / "parts", **keywords)
    begun.add_callback(StopAt(3))
    begun.train()
    state = torch.load(folder / "parts" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    if options["update_interval"] > 1:
        assert open_gradients(state) > 0
    resumed = trainer_of(CASES[name], optimizer, folder / "parts", **keywords)
    resumed.train(resume_from_checkpoint=str(folder / "parts" / "checkpoint-3"))
    assert logged(resumed)[3:] == logged(whole)[3:]
    assert len(logged(resumed)) == 6
    assert_bitwise(weights(resumed.model), weights(whole.model))
    assert offloaded(resumed.optimizer.optimizer) == CASES[name].matrices


@pytest.mark.parametrize(("name", "options"), [("sft", WINDOWED), ("sft_lora", EXACT)], ids=["sft-S4", "sft_lora-S1"])
def test_resume_in_a_window(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_resume(name, options, False, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [("sft", EXACT), ("sft_lora", WINDOWED)], ids=["sft-S1", "sft_lora-S4"])
def test_other_resume_in_a_window(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_resume(name, options, False, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("options", [EXACT, WINDOWED], ids=["S1", "S4"])
@pytest.mark.parametrize("name", ["sft_tokens_accumulated", "dpo_precomputed"])
def test_compiled_resume_in_a_window(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_resume(name, options, True, tmp_path)


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.long), True], ids=["eager", "compiled"])
def test_last_adapter_holds_every_gradient(compiled: bool, tmp_path: Path) -> None:
    """Only adapters are saved, through PEFT's own state dict."""
    saved = {}
    for name, callbacks in (("without", []), ("with", [ZenFlowCallback()])):
        folder = tmp_path / name
        saving = {"save_strategy": "steps", "max_steps": 6}
        trainer = trainer_of(CASES["sft_lora"], (zf.ZenFlowAdamW, WINDOWED), folder, compiled=compiled, **saving)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        saved[name] = load_file(folder / "checkpoint-6" / "adapter_model.safetensors")
    trainer.optimizer.optimizer.close()
    assert_bitwise(saved["with"], get_peft_model_state_dict(trainer.model))
    assert difference(saved["with"], saved["without"]) > 1e-4
