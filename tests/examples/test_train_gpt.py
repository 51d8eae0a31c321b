"""The GPT example learns, resumes bitwise, compares, and names the mistake in its options."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples import checkpoint
from examples.arguments import POLICIES, parse
from examples.settings import TrainConfig
from examples.stdlib_text import Text
from examples.train_gpt import compare, initial_model, train

TINY = TrainConfig(
    steps=12,
    batch=2,
    context=16,
    layers=2,
    width=64,
    warm_up=3,
    lr=1e-3,
    inner="eager",
    device="cpu",
    evaluate_every=100,
    evaluation_batches=2,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("policy", POLICIES)
def test_learns(policy: str, repeating_text: Text) -> None:
    short = train(replace(TINY, policy=policy, steps=4), text=repeating_text)
    long = train(replace(TINY, policy=policy, steps=60), text=repeating_text)
    assert long.validation_loss < short.validation_loss - 0.5
    assert long.step_ms > 0
    assert long.tokens_per_second > 0
    assert {"steps", "step_ms", "stall_ms_per_step", "traffic_model_sizes_per_step"} <= set(long.profile)
    assert long.profile["steps"] == 60 - 3  # what is measured starts after the warm-up


@pytest.mark.parametrize(("optimizer", "lr"), [("Lion", 3e-4), ("Muon", 2e-3)])
def test_learns_by_another_rule(optimizer: str, lr: float, repeating_text: Text) -> None:
    short = train(replace(TINY, optimizer=optimizer, lr=lr, steps=4), text=repeating_text)
    long = train(replace(TINY, optimizer=optimizer, lr=lr, steps=60), text=repeating_text)
    assert long.validation_loss < short.validation_loss - 0.5


def test_state_is_placed_by_the_policy(repeating_text: Text) -> None:
    resident, zero_offload, zenflow = compare(replace(TINY, steps=6), text=repeating_text)
    assert resident.host_bytes == 0
    assert zero_offload.host_bytes > 0
    assert zenflow.host_bytes > 0
    assert resident.device_bytes > zenflow.device_bytes > zero_offload.device_bytes
    # Both are AdamW, step for step.
    assert zero_offload.validation_loss == pytest.approx(resident.validation_loss, abs=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_resume_is_bitwise(policy: str, repeating_text: Text, tmp_path: Path) -> None:
    # Step 7 is in the middle of windows of 4 steps, and after the synchronous start.
    whole = replace(TINY, policy=policy, save_every=7, out=str(tmp_path / "whole"))
    uninterrupted = train(whole, text=repeating_text)
    (middle,) = (tmp_path / "whole").glob("step-000007-*.pt")
    torch.compiler.reset()
    resumed = train(replace(whole, out=str(tmp_path / "resumed"), resume=str(middle)), text=repeating_text)

    assert resumed.validation_loss == uninterrupted.validation_loss
    assert uninterrupted.checkpoint is not None
    assert resumed.checkpoint is not None
    expected = torch.load(uninterrupted.checkpoint, weights_only=True)["model"]
    actual = torch.load(resumed.checkpoint, weights_only=True)["model"]
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []


def test_resume_refuses_other_settings(repeating_text: Text, tmp_path: Path) -> None:
    finished = train(replace(TINY, steps=4, out=str(tmp_path), save_every=2), text=repeating_text)
    middle = str(next(tmp_path.glob("step-000002-*.pt")))
    with pytest.raises(ValueError, match=r"lr=0.5 differs from the checkpoint's 0.001"):
        train(replace(finished.config, lr=0.5, resume=middle), text=repeating_text)
    with pytest.raises(ValueError, match="nothing is left to do"):
        train(replace(finished.config, resume=str(finished.checkpoint)), text=repeating_text)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        train(replace(finished.config, resume=str(tmp_path / "none.pt")), text=repeating_text)

    config, comparing = parse(["--resume", middle, "--out", "elsewhere"])
    assert not comparing
    assert config == replace(finished.config, resume=middle, out="elsewhere")
    with pytest.raises(SystemExit):
        parse(["--resume", middle, "--steps", "9"])


def test_resume_names_settings_that_it_does_not_know(
    repeating_text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(TINY, steps=4, out=str(tmp_path), save_every=2)
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "asdict", lambda config: asdict(config) | {"dropout": 0.5})
        train(config, text=repeating_text)
    middle = str(next(tmp_path.glob("step-000002-*.pt")))
    message = r"made with dropout=0\.5, which this version does not know; resume it with the version .*--start-from"
    with pytest.raises(ValueError, match=message):
        train(replace(config, resume=middle), text=repeating_text)
    with pytest.raises(SystemExit):
        parse(["--resume", middle])
    assert "dropout=0.5" in capsys.readouterr().err
    initial_model(replace(TINY, start_from=middle))


def test_start_from_takes_only_the_weights(repeating_text: Text, tmp_path: Path) -> None:
    first = train(replace(TINY, steps=4, out=str(tmp_path)), text=repeating_text)
    torch.compiler.reset()
    tuned = replace(TINY, start_from=str(first.checkpoint), seed=1)
    started = initial_model(tuned).state_dict()
    assert first.checkpoint is not None
    saved = torch.load(first.checkpoint, weights_only=True)["model"]
    assert [name for name in saved if not torch.equal(saved[name], started[name])] == []
    assert train(tuned, text=repeating_text).profile["steps"] == 12 - 3  # all of its own steps
    with pytest.raises(ValueError, match=r"has layers=2 and this run layers=3; give this run the sizes"):
        train(replace(tuned, layers=3), text=repeating_text)


def test_no_compilation_is_timed(repeating_text: Text) -> None:
    """Neither steps nor the first evaluation compile after the warm-up, so no policy wins by compiling less."""
    result = train(replace(TINY, evaluate_every=5), text=repeating_text)
    assert result.profile["compilations"] == 0
    assert result.profile["evaluation_ms"] > 0


def test_live_shows_the_last_steps(repeating_text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    train(replace(TINY, live=True), text=repeating_text, console=Console(file=io.StringIO()))
    assert "zenflow: step 11: " in capsys.readouterr().err


def test_compare_prints_one_table_that_fits(repeating_text: Text) -> None:
    output = io.StringIO()
    compare(replace(TINY, steps=6), text=repeating_text, console=Console(file=output, width=80))
    table = output.getvalue().partition("parameters, 6 steps")[2]
    assert table
    rows = [line for line in table.splitlines() if any(policy in line for policy in POLICIES)]
    assert len(rows) == len(POLICIES)
    assert "…" not in table  # nothing was cut off
    assert all(heading in table for heading in ("step ms", "stall ms", "device MB", "host MB", "traffic"))


def test_options() -> None:
    config, comparing = parse(["--compare", "--steps", "100", "--update-interval", "2", "--lr", "2e-3"])
    assert comparing
    assert (config.steps, config.update_interval, config.lr, config.out) == (100, 2, 2e-3, None)
    assert parse([])[0].out == "runs/train_gpt"
    assert parse(["--update-interval", "auto"])[0].update_interval == "auto"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--steps", "10", "--warm-up", "10"], "warm_up=10 must be in [0, steps=10)"),
        (["--policy", "zenflov"], "invalid choice"),
        (["--update-interval", "often"], "invalid interval value: 'often'"),
        (["--compare", "--resume", "x.pt"], "use one of them"),
        (["--resume", "x.pt"], "no checkpoint at x.pt"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
