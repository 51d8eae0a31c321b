"""The pictures of a comparison and of a report: SVG files without network fonts that show their words."""

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


def test_command_writes_pictures(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    size = ["--layers", "1", "--width", "64"]
    folder = tmp_path / "made"
    try:
        assert report_picture.main(["--out", str(folder), *size, "--steps", "4", "--inner", "eager"]) == 0
    finally:
        torch.set_num_threads(threads)
    parts = {
        "report.svg": ("The last 4 steps", "compute", "worker 0", "step time", "forward +", "host update", "FLOP/s"),
        "compare.svg": ("zero_offload", "zenflow takes", "times as fast", "compute", "worker 0"),
    }
    for name, expected in parts.items():
        shown, content = words(folder / name), (folder / name).read_text()
        for part in expected:
            assert part in shown
        assert "url(http" not in content
        assert content.count("http") == 1  # the name space of SVG


@pytest.mark.parametrize(("name", "part"), [("report.svg", "step time"), ("compare.svg", "times as fast")])
def test_committed_picture_is_small_and_readable(name: str, part: str) -> None:
    path = Path(__file__).parents[2] / "docs" / name
    assert path.stat().st_size < 150_000
    assert part in words(path)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--columns", "200"], "--columns 200 must be from 80 to 100"),
    ],
)
def test_wrong_options(option: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report_picture.main(["--out", "unused", *option])
    assert says in capsys.readouterr().err
