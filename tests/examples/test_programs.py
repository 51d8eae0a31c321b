"""What holds for all example programs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

import zenflow_compile
from zenflow_compile import rules

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = ["classify", "finetune_lm", "report_picture", "train_gpt"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("classify", "finetune_lm"):
        pytest.importorskip("transformers", reason="needs the hf extra")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"examples.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"python -m examples.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_only_public_names_are_imported(path: Path) -> None:
    """Readers copy the examples: what they import must stay."""
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{each.name}" for each in node.names}
    ours = {each for each in imported if each.partition(".")[0] == "zenflow_compile"}
    public = {"zenflow_compile", *(f"zenflow_compile.{name}" for name in zenflow_compile.__all__)}
    public |= {f"zenflow_compile.rules.{name}" for name in rules.__all__}
    assert ours <= public


def test_minimal_program_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    torch.compiler.reset()
    code, compiled = (FOLDER / "minimal.py").read_text(), '(model, backend="zenflow"'
    assert compiled in code
    exec(code.replace(compiled, compiled + ', options={"inner": "eager"}'), {"__name__": "__main__"})
    said = capsys.readouterr().out
    losses = [
        float(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("step ") and "loss" in line
    ]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert "host update" in said
