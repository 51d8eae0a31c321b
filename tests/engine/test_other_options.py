"""A state that was saved with other options loads as if ``flush()`` had been called before it was saved."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.settings import settings
from tests.support.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:the state of .* was saved with other options:UserWarning")

SETTINGS = settings(
    "resident zero_offload twinflow each_step stale stale_windows summed_auto all_selected none_selected zero_infinity",
    streamed="every_second_streamed",
    windows="selecting_windows",
    auto="long_auto",
    int8="compressed",
    summed="summed_windows",
)
EXACT = ("resident", "zero_offload", "twinflow", "streamed", "each_step", "zero_infinity")
STEP, END = 6, 10
ROUNDING = 1e-8
"""A flush at load has other operators than one of the engine."""
OF_ALL = ("step", "exp_avg", "exp_avg_sq")


def training(name: str, folder: Path, dtype: torch.dtype) -> Training:
    options: dict[str, Any] = SETTINGS[name]
    if options.get("policy") == "zero_infinity":
        folder.mkdir()
        options = {**options, "nvme_path": str(folder)}
    return Training(None, options, dtype)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), itertools.permutations(SETTINGS, 2))
def test_state_loads_as_a_flushed_one(before: str, after: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Moments, masters and weights; and the run goes on."""
    saving = training(before, tmp_path / "saving", dtype).run(0, STEP)
    saved = saving.saved()
    saving.optimizer.flush()
    flushed = saving.optimizer.state_dict()["state"]
    loading = training(after, tmp_path / "loading", dtype).run(0, 2).load(saved)
    found = loading.optimizer.state_dict()["state"]
    for index, entry in flushed.items():
        for key in (*OF_ALL, *(["master"] if {"master"} <= entry.keys() & found[index].keys() else [])):
            torch.testing.assert_close(found[index][key], entry[key], atol=ROUNDING, rtol=1e-6)
        assert int(found[index].get("open", 0)) == 0
    for ours, expected in zip(loading.weights(), saving.weights(), strict=True):
        torch.testing.assert_close(ours, expected, atol=ROUNDING if dtype == torch.float32 else 1e-3, rtol=1e-6)
    assert loading.optimizer.engine.step == STEP
    loading.run(STEP, END)
    loading.optimizer.flush()
    saving.run(STEP, END)
    saving.optimizer.flush()
    if before in EXACT and after in EXACT:
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
        for ours, expected in zip(loading.weights(), saving.weights(), strict=True):
            torch.testing.assert_close(ours, expected, atol=rounding, rtol=0)


@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_selected_slices_stay_selected(ratio: float) -> None:
    """As far as there is room; further ones are those with the best scores."""
    saving = Training(None, {"topk_ratio": 0.25, "update_interval": 2, "select_interval": 2}).run(0, STEP)
    entries = saving.optimizer.state_dict()["state"]
    loading = Training(None, {"topk_ratio": ratio, "update_interval": 2, "select_interval": 2}).load(saving.saved())
    for index, entry in loading.optimizer.state_dict()["state"].items():
        if "mask" in entry:
            first, second = (
                (entry["mask"], entries[index]["mask"]) if ratio < 0.25 else (entries[index]["mask"], entry["mask"])
            )
            assert bool(second[first].all())


def test_a_sentence_says_so() -> None:
    saved = Training(None, {"update_interval": 4}).run(0, STEP).saved()
    with pytest.warns(
        UserWarning, match=r"the state of 3 parameters was saved with other options, .* 2 update windows"
    ):
        Training(None, {"update_interval": 2}).load(saved)


def test_weights_come_first() -> None:
    """Those of an open window, since its update is written into them."""
    saved = Training(None, {"update_interval": 4}).run(0, STEP).saved()
    with pytest.raises(ValueError, match=r"with other options, in the middle of an update window.*weights first"):
        Training(None, {"update_interval": 2}).load(saved, weights_first=False)


DAMAGE = {
    "placement": 9,
    "row_dims": 2,
    "dim": 2,
    "k": 1000,
    "interval": 10**9,
    "phase": 4,
    "staleness": 3,
    "summed": 2,
    "compressed": -1,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_impossible_plans_are_named(name: str) -> None:
    place = 1 + ["placement", "dtype", *list(DAMAGE)[1:]].index(name) if name != "placement" else 1
    loading = Training(None, {"update_interval": 4}).run(0, STEP)
    state = copy.deepcopy(loading.optimizer.state_dict())
    state["state"][0]["plan"][place] = DAMAGE[name]
    with pytest.raises(ValueError, match=rf"'plan' with {name}="):
        loading.optimizer.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("own", "error"),
    [
        ({"update_interval": 1}, "no 'coefficients'"),
        ({"update_interval": 2}, "CheckpointException"),
        ({"update_interval": 4, "topk_ratio": 0.5}, ""),
        ({"policy": "zero_offload"}, "no 'coefficients'"),
    ],
)
def test_dcp_drops_no_window(own: dict[str, Any], error: str, tmp_path: Path) -> None:
    saving = Training(None, {"update_interval": 4}).run(0, STEP)
    dcp.save({"model": saving.model, "optimizer": saving.optimizer}, checkpoint_id=tmp_path / "saved")
    loading = Training(None, own)
    loads = partial(
        dcp.load, {"model": loading.model, "optimizer": loading.optimizer}, checkpoint_id=tmp_path / "saved"
    )
    if error:
        with pytest.raises((ValueError, CheckpointException), match=error):
            loads()
        return
    loads()
    saving.optimizer.flush()
    for ours, expected in zip(loading.weights(), saving.weights(), strict=True):
        torch.testing.assert_close(ours, expected, atol=ROUNDING, rtol=1e-6)
