"""Tests ``zenflow-compile plan --frontier`` and ``--models``: tables, JSON, the picture, and refused flags."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import zenflow_compile as zf
from zenflow_compile.cli import main
from zenflow_compile.cli.plan_report import enough, missing
from zenflow_compile.performance import models

# Few plans: what is given is not searched.
SMALL = ["plan", "--params", "1e8", "--hardware", "rtx-4090", "--tokens", "1024", "--sequence", "1024"]
SMALL += ["--device-memory", "1.9GB", "--host-memory", "1.6GB"]
FRONTIER = [*SMALL, "--frontier", "--policy", "zenflow", "--update-interval", "1", "--topk-ratio", "0.1"]
MODELS = ["plan", "--models", "--hardware", "rtx-4090", "--tokens", "1024"]


@cache
def run(*arguments: str) -> tuple[str, str]:
    """What the command prints, and what it says beside it. A search takes seconds."""
    with redirect_stdout(io.StringIO()) as text, redirect_stderr(io.StringIO()) as beside:
        assert main.main([*arguments]) == 0
    return text.getvalue(), beside.getvalue()


def answer(arguments: list[str]) -> dict[str, Any]:
    return dict(json.loads(run(*arguments, "--json")[0]))


def printed(arguments: list[str]) -> str:
    return run(*arguments)[0]


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the table with this title."""
    lines = text.split(title)[1].splitlines()
    found = [
        line.split() for line in lines[: lines.index("Options to paste:") if "Options to paste:" in lines else None]
    ]
    return [cells for cells in found if cells and cells[0].isdigit()]


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name: models.MODELS[name] for name in ("llama3-70b", "qwen3-0.6b")}
    monkeypatch.setattr(models, "MODELS", named)


def test_frontier_is_printed() -> None:
    found = answer(FRONTIER)
    text = printed(FRONTIER)
    points = found["points"]
    assert len(points) > 2
    best = points[found["device"][0]]
    device = sum(best["needs"]["device"].values()) / 1e9
    assert f"As fast, but for 1%: with {device:.1f} GB of device memory" in " ".join(text.split())
    assert "The fastest plan that fits takes" in text
    pasted = re.findall(r"^(\d+): (\{.*\}) recompute=(\w+)$", text, re.MULTILINE)
    assert [(int(number), json.loads(options), recompute == "True") for number, options, recompute in pasted] == [
        (number, each["options"], each["recompute"]) for number, each in enumerate(points, start=1)
    ]


def test_each_gb_less_has_its_cost() -> None:
    """From one row to the next: milliseconds more over GB less, of the table's memory."""
    found = answer(FRONTIER)
    text = printed(FRONTIER)
    checked = 0
    for title, memory in (("Less device memory", "device"), ("Less host memory", "host")):
        plans = [found["points"][index] for index in found[memory]]
        table = rows(text.split("Less host memory")[0] if memory == "device" else text, title)[: len(plans)]
        assert [cells[0] for cells in table] == [str(index + 1) for index in found[memory]]
        for before, after, cells in zip(plans, plans[1:], table[1:], strict=False):
            less = sum(before["needs"][memory].values()) - sum(after["needs"][memory].values())
            assert f"{1e12 * (after['step_s'] - before['step_s']) / less:.0f}" in cells
            checked += 1
    assert checked > 5


def test_pasted_options_are_those_of_the_table() -> None:
    for each in answer(FRONTIER)["points"]:
        given: dict[str, Any] = {"device_bytes": 1.9e9, "host_bytes": 1.6e9, "tokens": 1024, "sequence": 1024}
        given["recompute"] = each["recompute"]
        (again,) = zf.plan(1e8, "rtx-4090", **given | each["options"])["policies"]
        assert again["fits"]
        assert (again["step_s"], again["needs"]) == (each["step_s"], each["needs"])


def test_frontier_of_nothing_says_what_is_missing() -> None:
    text = printed([*FRONTIER, "--device-memory", "0.1GB"])
    said = r"Nothing fits: the nearest plan lacks GB: \d\.\d on device\. One fits with (\d\.\d) GB of device memory"
    found = re.search(said, " ".join(text.split()))
    assert found is not None
    assert "Nothing fits" not in printed([*FRONTIER, "--device-memory", f"{found[1]}GB"])


def test_models_that_fit_and_what_others_lack(two_models: None) -> None:
    found = answer(MODELS)
    small, large = found["models"]
    assert (small["model"], large["model"]) == ("qwen3-0.6b", "llama3-70b")
    assert small["best"]["fits"]
    assert small["best"]["options"] == {"policy": "resident", "gradient_accumulation_steps": 1}
    assert large["best"] is None
    assert large["shortages"]["host"] > 0
    text = printed(MODELS)
    assert re.search(r"qwen3-0\.6b +1 .* yes *\n", text)
    said = " ".join(text.split())
    assert f"llama3-70b: the nearest plan lacks GB: {missing(large['shortages'])}. One fits with " in said
    assert f"{enough(large['fits_with']['host'])} GB of host memory" in said
    assert 'qwen3-0.6b: {"policy": "resident", "gradient_accumulation_steps": 1} recompute=False' in text


def test_host_memory_decides_what_fits(two_models: None) -> None:
    given = [*MODELS, "--recompute", "--policy", "zero_offload"]
    little, enough = (answer([*given, "--host-memory", size])["models"][0] for size in ("3GB", "24GB"))
    assert (little["best"], list(little["shortages"])) == (None, ["host"])
    assert enough["best"]["fits"]


def test_search_shows_its_progress_at_a_terminal(two_models: None) -> None:
    with redirect_stdout(Terminal()) as shown, redirect_stderr(Terminal()) as progress:
        assert main.main(MODELS) == 0
    assert "Searching plans" in progress.getvalue()
    assert "Searching plans" not in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_answer_has_no_progress(two_models: None) -> None:
    assert run(*MODELS)[1] == ""


def drawn(path: Path) -> str:
    assert main.main([*FRONTIER, "--svg", str(path)]) == 0
    return path.read_text()


def test_picture_shows_the_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    points = answer(FRONTIER)["points"]
    picture = drawn(tmp_path / "first.svg")
    said = re.findall(r">([^<>]+)</text>", picture)
    assert "0.1b on rtx-4090, 1024 tokens per device and step" in said
    for label in ("time of a step, s", "device memory, GB", "host memory, GB"):
        assert any(label in each for each in said), label
    for number in range(1, len(points) + 1):
        assert str(number) in said
    assert drawn(tmp_path / "second.svg") == picture


def test_picture_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main.main([*FRONTIER, "--svg", "there.svg"])
    assert "pip install 'zenflow-compile[plots]'" in capsys.readouterr().err


def test_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    with pytest.raises(SystemExit):
        main.main([*FRONTIER, "--svg", str(tmp_path / "none" / "there.svg")])
    assert "cannot be written: No such file or directory; choose another place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SMALL, "--svg", "there.svg"], "--svg goes with --frontier; leave it out"),
        ([*MODELS, "--svg", "there.svg"], "--svg goes with --frontier; leave it out"),
        ([*SMALL, "--exact"], "--exact goes with --frontier or --models; leave it out"),
        ([*FRONTIER, "--trace", "there.json"], "--trace applies to a single plan"),
        ([*FRONTIER, "--explain"], "--explain applies to a single plan"),
        ([*MODELS, "--frontier"], "--frontier applies to a single model"),
        ([*SMALL, "--host-memory", "96 bytes"], "'96 bytes' must be bytes, as 24GB, 24GiB or 2.4e10"),
        ([*SMALL, "--models"], "not allowed with argument"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("96GB", 96e9), ("96 GiB", 96 * 2**30), ("2.4e10", 2.4e10), ("1.5TB", 1.5e12)]
)
def test_memory_with_and_without_a_unit(text: str, size: float) -> None:
    assert main.memory_bytes(text) == size
