"""Under ``run``, every optimizer of PyTorch that has a rule here is trained by it, or left alone with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenflow_compile import ZenFlow
from zenflow_compile.integrations.programs import Program, served
from zenflow_compile.integrations.pytorch_rules import NAMES

OPTIONS = {"update_interval": 1, "min_offload_size": 1, "device_share": 0}
REPLACED: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {}, "AdamW"),
    ("AdamW", {"amsgrad": True}, "AdamWAMSGrad"),
    ("Adam", {}, "AdamW"),
    ("Adam", {"weight_decay": 0.1}, "Adam"),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}, "AMSGrad"),
    ("Adam", {"amsgrad": True}, "AMSGrad"),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "AdamW"),
    ("NAdam", {"weight_decay": 0.1}, "NAdam"),
    ("RAdam", {}, "RAdam"),
    ("Adamax", {}, "Adamax"),
    ("Adagrad", {"lr_decay": 0.1}, "Adagrad"),
    ("RMSprop", {}, "MomentumRMSprop"),
    ("RMSprop", {"momentum": 0.5}, "MomentumRMSprop"),
    ("RMSprop", {"centered": True}, "CenteredRMSprop"),
    ("SGD", {"lr": 0.1}, "SGD"),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "SGD"),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, "NesterovSGD"),
]
EPS = {"eps": 1e-4}


def train(name: str, keywords: dict[str, Any], *, schedule: bool = True) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 40))
    optimizer = getattr(torch.optim, name)(model.parameters(), **keywords)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    for _ in range(10):
        model(torch.randn(16, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            scheduler.step()
    if isinstance(optimizer, ZenFlow):
        optimizer.close()
    return torch.cat([param.detach().flatten() for param in model.parameters()]), optimizer


@pytest.mark.parametrize(("name", "keywords", "rule"), REPLACED)
def test_optimizer_is_replaced(name: str, keywords: dict[str, Any], rule: str) -> None:
    keywords = keywords if name == "SGD" else EPS | keywords
    expected, theirs = train(name, keywords)
    lines: list[str] = []
    with served(Program(OPTIONS, lines.append)):
        found, optimizer = train(name, keywords)
        assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, ZenFlow)
    assert [type(each).__name__ for each in optimizer.rules] == [rule]
    assert lines[0].startswith(f"replaced: {name} over 4 parameters of ")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # What a program reads of a group is there, besides the switches that say how kernels run.
    kept = set(theirs.param_groups[0]) - {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
    assert kept <= set(optimizer.param_groups[0])


def test_all_of_them_are_tried() -> None:
    assert {"Muon", *(name for name, _, _ in REPLACED)} == set(NAMES)


def test_muon_next_to_adamw_is_replaced() -> None:
    """As its users have it: matrices by one optimizer, the others by another."""

    def trained() -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 40))
        matrices = [param for param in model.parameters() if param.dim() == 2]
        vectors = [param for param in model.parameters() if param.dim() != 2]
        optimizers = [
            torch.optim.Muon(matrices, lr=0.01, nesterov=False, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, **EPS),
        ]
        for _ in range(4):
            model(torch.randn(16, 40)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in optimizers:
            if isinstance(optimizer, ZenFlow):
                optimizer.close()
        return torch.cat([param.detach().flatten() for param in model.parameters()]), optimizers

    expected, _ = trained()
    lines: list[str] = []
    with served(Program(OPTIONS, lines.append)):
        found, optimizers = trained()
        assert isinstance(optimizers[0], torch.optim.Muon)
    assert [type(each.rules[0]).__name__ for each in optimizers] == ["Muon", "AdamW"]
    assert lines[0].startswith("replaced: Muon over 2 parameters of 3,840 elements by ZenFlow(Muon, ")
    assert optimizers[0].rules[0].fixed["nesterov"] is False
    assert float((found - expected).abs().max()) < 0.01  # of 0.06 that they moved; the noise of bf16


@pytest.mark.parametrize(
    ("name", "keywords", "reason"),
    [
        ("Adagrad", {"initial_accumulator_value": 0.1}, "initial_accumulator_value above 0: here sums begin at 0"),
        ("NAdam", {"decoupled_weight_decay": True}, "decoupled_weight_decay=True, and the rule here has its"),
        ("Rprop", {}, "another rule"),
    ],
)
def test_optimizer_is_left_alone(name: str, keywords: dict[str, Any], reason: str) -> None:
    lines: list[str] = []
    with served(Program(OPTIONS, lines.append)):
        _, optimizer = train(name, keywords)
    assert type(optimizer) is getattr(torch.optim, name)
    assert any(line.startswith(f"left alone: {name} over ") and reason in line for line in lines), lines


@pytest.mark.parametrize(
    ("name", "groups", "reason"),
    [
        ("AdamW", [{"amsgrad": True}, {}], "groups with and without amsgrad"),
        ("SGD", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9}], "groups with and without nesterov"),
        ("Adam", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}], "and not of others"),
    ],
)
def test_groups_of_two_rules_are_left_alone(name: str, groups: list[dict[str, Any]], reason: str) -> None:
    lines: list[str] = []
    layers = [nn.Linear(8, 8) for _ in groups]
    given = [{"params": [*layer.parameters()], **group} for layer, group in zip(layers, groups, strict=True)]
    with served(Program(OPTIONS, lines.append)):
        optimizer = getattr(torch.optim, name)(given, lr=0.1)
    assert not isinstance(optimizer, ZenFlow)
    assert reason in lines[0]


@pytest.mark.parametrize(("name", "keywords"), [("SGD", {}), ("RMSprop", EPS), ("RMSprop", EPS | {"centered": True})])
def test_momentum_that_a_scheduler_gives_is_used(name: str, keywords: dict[str, Any]) -> None:
    def steps() -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(40, 40)
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01, **keywords)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=9)
        for _ in range(8):
            layer(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert optimizer.param_groups[0]["momentum"] > 0.5
        if isinstance(optimizer, ZenFlow):
            optimizer.close()
        return [param.detach() for param in layer.parameters()]

    expected = steps()
    with served(Program(OPTIONS, [].append)):
        found = steps()
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_decay_that_comes_later_is_adams() -> None:
    def steps() -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(40, 40)
        optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True, eps=1e-4)
        for _ in range(6):
            layer(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if isinstance(optimizer, ZenFlow):
            optimizer.close()
        return layer.weight.detach()

    expected = steps()
    with served(Program(OPTIONS, [].append)):
        torch.testing.assert_close(steps(), expected, rtol=1e-5, atol=1e-6)


def test_trainer_by_another_rule(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def trained(folder: Path) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        model = nn.Linear(40, 40)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = model

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {"loss": self.layer(x).square().mean()}

        args = transformers.TrainingArguments(
            str(folder), optim="sgd", learning_rate=0.1, max_steps=5, report_to=[], use_cpu=True, save_strategy="no"
        )
        data = [{"x": torch.full((40,), 0.1 * number)} for number in range(40)]
        trainer = transformers.Trainer(Model(), args, train_dataset=data)
        trainer.train()
        return model.weight.detach(), trainer.optimizer

    expected, _ = trained(tmp_path / "plain")
    lines: list[str] = []
    with served(Program(OPTIONS, lines.append)):
        found, _ = trained(tmp_path / "ours")
    assert any(line.startswith("replaced: SGD") for line in lines)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_others_are_left_alone_if_asked() -> None:
    with served(Program(OPTIONS, [].append, keeps_others=True)):
        layer = nn.Linear(8, 8)
        assert not isinstance(torch.optim.SGD(layer.parameters(), lr=0.1), ZenFlow)
        assert isinstance(torch.optim.AdamW(layer.parameters()), ZenFlow)
