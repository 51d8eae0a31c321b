"""No control character of a name or a file reaches a terminal."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import zenflow_compile
from tests.engine.test_files import full_after
from zenflow_compile import ZenFlowAdamW
from zenflow_compile.checks.validate import printable
from zenflow_compile.native import build
from zenflow_compile.performance import models


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("größe/重み", "größe/重み"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31mred\x90", r"\x9b31mred\x90"),
        ("a\u202eb\u2066c\u200bd", r"a\u202eb\u2066c\u200bd"),
        ("one\r\ntwo\u2028", r"one\r\ntwo\u2028"),
        ("\a\b\0\x7f", r"\x07\x08\x00\x7f"),
        ("file-\udcff", r"file-\udcff"),
        ("\U000e0001", r"\U000e0001"),
        (12, "12"),
    ],
)
def test_shown_text(text: object, shown: str) -> None:
    assert printable(text) == shown


def test_every_result_is_printable() -> None:
    assert all(printable(chr(code)).isprintable() for code in range(0x110000))


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202eb\nc"


def hostile_model() -> nn.Module:
    model = nn.Module()
    model.register_parameter(HOSTILE, nn.Parameter(torch.ones(64, 64)))
    model.register_parameter("\x1b[1mbias", nn.Parameter(torch.ones(64)))
    return model


def assert_safe(text: str) -> None:
    assert text
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


def options(**given: Any) -> dict[str, Any]:
    return {"min_offload_size": 100, "update_interval": 1, **given}


def train(model: nn.Module, optimizer: ZenFlowAdamW) -> None:
    for _ in range(3):
        sum((param.square().sum() for param in model.parameters()), torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("terminal", [False, True])
def test_report_and_explain_show_names_safely(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = hostile_model()
    optimizer = ZenFlowAdamW(model.named_parameters(), **options())
    with zenflow_compile.profile(optimizer) as recorded:
        train(model, optimizer)
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, no_color=True, color_system=None)
    recorded.report(console)
    explanation = zenflow_compile.explain(model, console=console, full=True)
    shown = output.getvalue() + str(explanation) + capsys.readouterr().out
    assert r"\x1b]0;title\x07" in shown.replace("\n", "")
    assert_safe(shown)
    optimizer.close()


def test_errors_show_names_and_paths_safely(tmp_path: Path) -> None:
    directory = tmp_path / HOSTILE.replace("/", "")
    directory.mkdir()
    model = hostile_model()
    model.register_parameter(f"{HOSTILE}2", nn.Parameter(torch.ones(64, 64)))
    in_files = options(policy="zero_infinity", nvme_path=directory, host_window_bytes=12 * 64 * 64)  # of one of them
    texts = []
    for bad in ({**in_files, "host_window_bytes": 4096}, {**in_files, "nvme_path": directory / "absent"}):
        with pytest.raises(ValueError, match=r"\\x1b") as caught:
            ZenFlowAdamW(model.named_parameters(), **bad).synchronize()
        texts.append(caught.value)

    optimizer = ZenFlowAdamW(model.named_parameters(), **in_files)
    train(model, optimizer)

    with full_after(0):
        with pytest.raises(RuntimeError) as failed:
            train(model, optimizer)
        # Raised as it is where the step waits for the state, and as the cause of a host update that has failed.
        cause = failed.value
        while cause.__cause__ is not None and "could not be written" not in str(cause):
            cause = cause.__cause__
        assert "could not be written" in str(cause)
        texts.append(cause)
        with suppress(RuntimeError):  # the same failure again
            optimizer.close()

    with pytest.raises(ValueError, match=r"\\x1b") as unread:
        models.from_config(directory)
    texts.append(unread.value)
    for text in texts:
        assert_safe(str(text))


def test_unwritable_cache_warning_is_safe() -> None:
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="every process compiles them again") as caught:
        build.warn_once(f"{HOSTILE}\n\x1b[31merror\x1b[m: no space")
    assert_safe(str(caught[0].message))
