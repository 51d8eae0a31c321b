"""The kernels of the roofline table do the same work, and the table names the ones that were not measured."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import host_adam
from benchmarks.systems.memory import PinnedThreads, copy_gb_per_s

NUMEL = 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_pieces_flush_one_gradient_alike(dtype: torch.dtype) -> None:
    ours, pieces = (host_adam.Window(NUMEL, 1, dtype) for _ in range(2))
    ours.host_adam("ours")(slice(0, NUMEL))
    pieces.fused()(slice(0, NUMEL))
    # Ours applies a clip factor of 0.5. It scales the moments; AdamW's first step does not depend on it.
    for a, b, scale in zip(ours.state, pieces.state, (1.0, 2.0, 4.0), strict=True):
        torch.testing.assert_close(a * scale, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.out, pieces.out)
    assert not any(gradient.any() for gradient in pieces.gradients)


def test_shares_cover_all_elements_once() -> None:
    for numel, threads in ((1000, 3), (64, 2), (2**20, 7)):
        cuts = [host_adam._share(numel, threads, number) for number in range(threads)]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == numel
        assert all(a[1] == b[0] for a, b in pairwise(cuts))


def test_end_to_end(results: Path, tmp_path: Path) -> None:
    missing = ["--deepspeed-python", str(tmp_path / "python")]
    sizes = ["--params", "0.01", "--slots", "1", "2", "--dtype", "bf16", "--threads", "1", "--rounds", "2"]
    kernels = ["--kernel", "copy", "ours", "fused", "deepspeed"]
    assert host_adam.main([*sizes, *kernels, *missing]) == 0
    rows = json.loads((results / "host_adam.json").read_text())["rows"]
    measured = [row for row in rows if "skipped" not in row]
    assert [(row["kernel"], row["slots"]) for row in measured] == [
        (kernel, slots) for slots in (1, 2) for kernel in ("copy", "ours", "fused")
    ]
    assert {row["bytes_per_parameter"] for row in measured} == {28, 30}
    assert all("setup_deepspeed.sh" in row["skipped"] for row in rows if row not in measured)


def test_compiled_kernel_decides_the_targets(results: Path) -> None:
    sizes = ["--params", "0.01", "--slots", "2", "--dtype", "bf16", "--threads", "1", "--rounds", "2"]
    assert host_adam.main([*sizes, "--kernel", "copy", "ours", "fused"]) == 0
    written = json.loads((results / "host_adam.json").read_text())
    assert [target["at_least"] for target in written["targets"]] == [True, True]


def test_copies_are_measured_and_threads_are_bounded() -> None:
    assert copy_gb_per_s(1, mib_each=1, repeats=2) > 0
    with pytest.raises(ValueError, match="threads=10000 must be at most"):
        PinnedThreads(10000)
