"""The page of a profile: what it says, what it draws, and that it needs nothing else."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.profiling.synthetic import MS, event, known_run, recording
from zenflow_compile.profiling.content import rows_of, sentences_of
from zenflow_compile.profiling.page import page
from zenflow_compile.profiling.recording import Recording
from zenflow_compile.profiling.summary import summarize

EVIL = "</script><img src=x onerror=alert(1)>\u2028\x1b[31m&amp;"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def data_of(text: str) -> list[dict[str, Any]]:
    """The data of each section."""
    return [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)]


class Words(HTMLParser):
    """The text outside of scripts and styles, and all tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent and data.strip():
            self.said.append(data.strip())


def test_says_what_the_report_says() -> None:
    run = dataclasses.replace(known_run(), title="optimizer 1 of 2")
    said = Words(page([run])).said
    assert "optimizer 1 of 2" in said
    for sentence in sentences_of(run, summarize(run)):
        assert sentence in said
    for name, value in rows_of(run, summarize(run)):
        assert said[said.index(name) + 1] == value


def test_needs_no_network() -> None:
    text = page([known_run()])
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    loaded = [attrs for tag, attrs in Words(text).tags if tag in ("link", "img", "iframe") or attrs.get("src")]
    assert loaded == []
    assert "prefers-color-scheme: dark" in text


def test_data_has_the_spans() -> None:
    (data,) = data_of(page([known_run()]))
    lanes = {lane["name"]: lane for lane in data["lanes"]}
    assert list(lanes) == ["compute", "D2H", "H2D", "worker 0", "worker 1"]
    worker = lanes["worker 1"]
    assert (worker["starts"], worker["durations"]) == ([20 * MS, 40 * MS], [10 * MS] * 2)  # from the start before
    assert [data["marks"][mark][0] for mark in worker["marks"]] == ["host update, hidden"] * 2
    assert worker["bytes"] == [100_000_000] * 2
    assert data["steps"] == [[0, 40 * MS, 7], [40 * MS, 80 * MS, 8]]
    assert data["view"] == [0, 80 * MS]
    assert data["end"] == 86 * MS  # worker 0 ends after the last step


def test_only_the_last_steps_are_shown_first() -> None:
    steps = [event("step", "step", 10 * i, 10 * i + 10, step=i) for i in range(9)]
    (data,) = data_of(page([recording(steps)], steps=2))
    assert (data["view"], data["end"], len(data["steps"])) == ([70 * MS, 90 * MS], 90 * MS, 9)
    (data,) = data_of(page([recording(steps)], steps=2, of_all=False))
    assert (data["view"], data["end"], len(data["steps"])) == ([0, 20 * MS], 20 * MS, 2)


def test_names_cannot_become_code() -> None:
    events = [event("worker 0", "host_update", 1, 2, param=EVIL), event("gradients", "dense", 3, 3, param=EVIL)]
    text = page([dataclasses.replace(recording([*known_run().events, *events]), title=EVIL)])
    assert "onerror" not in html.unescape(re.sub(r"<script.*?</script>|<(h2|td|p)[^>]*>[^<]*", "", text, flags=re.S))
    assert not [tag for tag, _ in Words(text).tags if tag == "img"]
    assert all(character == "\n" or character.isprintable() for character in text)
    (data,) = data_of(text)
    assert any(name.startswith("</script><img") for name in data["params"])


def test_nothing_was_measured() -> None:
    text = page([])
    assert "Nothing was measured" in text
    assert not data_of(text)


def many(count: int) -> Recording:
    """``count`` host updates of one microsecond, each of which is followed by one of pause."""
    events = [
        event("worker 0", "host_update", i * 2e-3, i * 2e-3 + 1e-3, step=0, param=f"p{i % 50}") for i in range(count)
    ]
    length = count * 2e-3
    return recording([*events, event("step", "step", 0, length), event("compute", "forward", 0, length / 2)])


def test_100_000_events_are_a_small_page_at_once() -> None:
    began = time.process_time()
    text = page([many(100_000)])
    assert len(text) < 5_000_000
    (data,) = data_of(text)
    assert sum(data["lanes"][3]["durations"]) == 100_000 * 1_000
    assert time.process_time() - began < 30  # and not quadratic


def drawn(path: Path, script: str) -> Any:
    """What ``script`` returns in the page, by headless Chromium."""
    code = f"<script>document.title = 'done:' + encodeURIComponent(JSON.stringify((() => {{{script}}})()))</script>"
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{code}</body>"), encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        "--dump-dom",
        path.as_uri(),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"<title>done:(.*?)</title>", output)
    assert found, output[:2000]
    from urllib.parse import unquote

    return json.loads(unquote(found[1]))


_SHARES = """
  const view = views[0], lane = view.data.lanes.findIndex(lane => lane.name === "worker 0");
  const first = Math.ceil(view.left), last = view.canvas.clientWidth - RIGHT;
  const columns = view.columns(view.data.lanes[lane], first, last), marks = view.data.marks.length;
  const scale = view.canvas.width / view.canvas.clientWidth, top = (HEAD + lane * (ROW + GAP)) * scale;
  const pixels = view.pen.getImageData(first * scale, top, (last - first) * scale, ROW * scale);
  const shown = [];
  for (let x = 0; x < pixels.width; x++) {
    let busy = 0;
    for (let y = 0; y < pixels.height; y++) {
      const at = 4 * (y * pixels.width + x), lightness = pixels.data[at] + pixels.data[at + 1] + pixels.data[at + 2];
      if (Math.abs(pixels.data[at] - pixels.data[at + 2]) > 30) busy++;
    }
    shown.push(busy / pixels.height);
  }
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_browser_draws_the_shares(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([many(100_000)]), encoding="utf-8")
    shown = drawn(path, f"{_SHARES} return shown;")
    assert len(shown) > 500
    assert max(abs(share - 0.5) for share in shown[1:-1]) <= 1 / 8  # each pixel is many updates, half of the time


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_browser_zooms_and_describes(tmp_path: Path) -> None:
    events = [*known_run().events, event("worker 0", "host_update", 79, 80, step=8, param=EVIL)]
    path = tmp_path / "page.html"
    path.write_text(page([recording(events)]), encoding="utf-8")
    seen = drawn(
        path,
        """
        const view = views[0], before = [view.from, view.to], anchor = view.time(400);
        view.zoom(.5, anchor);
        const after = [view.from, view.to], kept = view.time(400) - anchor;
        view.show(-1e9, 1e12);
        const all = [view.from, view.to];
        view.describe(view.x(79.5e6), HEAD + 3 * (ROW + GAP) + 5);
        const said = view.detail.textContent, box = view.canvas.getBoundingClientRect();
        const at = {clientX: box.left + 400, clientY: box.top + 30, bubbles: true, cancelable: true};
        view.canvas.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -500}));
        const wheeled = [view.from, view.to];
        view.canvas.setPointerCapture = () => null;  // there is no pointer
        view.canvas.dispatchEvent(new PointerEvent("pointerdown", {...at, pointerId: 1}));
        view.canvas.dispatchEvent(new PointerEvent("pointermove", {...at, pointerId: 1, clientX: at.clientX + 50}));
        const dragged = [view.from, view.to];
        return {before, after, kept, all, said, wheeled, dragged, images: document.images.length};
        """,
    )
    assert seen["before"] == [0, 80 * MS]
    assert seen["after"][1] - seen["after"][0] == pytest.approx(40 * MS)
    assert abs(seen["kept"]) < 1
    assert seen["all"] == [0, 86 * MS]
    assert seen["said"].startswith("worker 0: host update, hidden, </script><img")
    assert "step 8" in seen["said"]
    assert seen["images"] == 0
    length = seen["wheeled"][1] - seen["wheeled"][0]
    assert 10 * MS < length < 80 * MS
    assert seen["dragged"][1] - seen["dragged"][0] == pytest.approx(length)
    assert seen["dragged"][0] < seen["wheeled"][0]  # the time follows the pointer to the right
