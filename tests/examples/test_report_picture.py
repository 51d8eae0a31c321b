"""The picture of a report: an SVG without network fonts that shows the words of the report."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from examples import report_picture


def words(path: Path) -> str:
    """Return the text of a picture, with plain blanks."""
    found = " ".join("".join(text.itertext()) for text in ElementTree.parse(path).iter() if text.tag.endswith("text"))
    return " ".join(found.split())


def test_command_writes_a_picture_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(report_picture, "WIDTH", 64)
    monkeypatch.setattr(report_picture, "LAYERS", 1)
    path = tmp_path / "made" / "report.svg"
    try:
        assert report_picture.main(["--out", str(path), "--steps", "4", "--inner", "eager"]) == 0
    finally:
        torch.set_num_threads(threads)
    shown = words(path)
    for part in ("The last 4 steps", "compute", "worker 0", "step time", "forward +", "host update"):
        assert part in shown
    content = path.read_text()
    assert "url(http" not in content
    assert content.count("http") == 1  # the name space of SVG


def test_committed_picture_is_small_and_readable() -> None:
    path = Path(__file__).parents[2] / "docs" / "report.svg"
    assert path.stat().st_size < 150_000
    assert "step time" in words(path)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--columns", "200"], "--columns 200 must be from 80 to 100"),
    ],
)
def test_wrong_options(option: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report_picture.main(["--out", "unused.svg", *option])
    assert says in capsys.readouterr().err
