"""The GPT example on several ranks trains as on one, and its checkpoint continues on another number of them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.checkpoint import CheckpointError, load_checkpoint, load_weights
from examples.gpt import GPT
from examples.settings import TrainConfig
from examples.stdlib_text import Text, load_text
from examples.train_gpt import initial_model, train
from tests.support.calls import interrupted
from tests.support.rank_processes import RankProcesses, messages

pytestmark = pytest.mark.timeout(180)
TINY = TrainConfig(
    steps=10, batch=4, context=16, layers=2, width=64, warm_up=3, lr=1e-3, inner="eager", device="cpu",
    evaluate_every=100, evaluation_batches=2, save_every=6,
)  # fmt: skip


def text() -> Text:
    return load_text(2 << 20)


def as_rank(rank: int, config: TrainConfig) -> tuple[float, int, str]:
    result = train(config, text=text())
    return result.validation_loss, result.host_bytes, str(result.checkpoint)


def test_two_ranks_train_the_example(two_ranks: RankProcesses, tmp_path: Path) -> None:
    config = replace(TINY, out=str(tmp_path))
    (loss, host_bytes, checkpoint), (other_loss, *_) = two_ranks.call(as_rank, config)
    alone = train(TINY, text=text())
    assert loss == other_loss == pytest.approx(alone.validation_loss, abs=1e-3)
    assert host_bytes < 0.6 * alone.host_bytes
    middle = next(tmp_path.glob("step-000006-*.pt"))
    continued = train(replace(TINY, resume=str(middle)), text=text())
    assert continued.validation_loss == pytest.approx(loss, abs=1e-3)
    assert Path(checkpoint).is_file()


def test_odd_batch_is_refused(two_ranks: RankProcesses) -> None:
    for message in messages(two_ranks.outcomes(as_rank, replace(TINY, batch=3))):
        assert "--batch 3 cannot be divided among 2 ranks" in message


def weights_of(checkpoint: str) -> dict[str, Tensor]:
    """The weights in the last checkpoint of a sharded run."""
    model = GPT(TINY.gpt())
    load_weights(load_checkpoint(checkpoint), checkpoint, model)
    return dict(model.named_parameters())


@pytest.mark.parametrize("policy", ["zero_offload", "zenflow"])
def test_sharded_example_resumes_on_three_ranks(
    two_ranks: RankProcesses, three_ranks: RankProcesses, policy: str, tmp_path: Path
) -> None:
    config = replace(TINY, policy=policy, batch=6, fsdp=True, out=str(tmp_path))
    (loss, _, last), (other_loss, _, same) = two_ranks.call(as_rank, config)
    assert (loss, last) == (other_loss, same)
    expected = weights_of(last)
    middle = next(tmp_path.glob("step-000006-*"))
    resumed = three_ranks.call(as_rank, replace(config, resume=str(middle)))
    assert {each[2] for each in resumed} == {last}
    found = weights_of(last)
    differences = [float((expected[name] - found[name]).detach().abs().max()) for name in expected]
    if policy == "zero_offload":
        assert max(differences) < 1e-6
        alone = train(replace(config, fsdp=False, out=None), text=text())
        assert loss == pytest.approx(alone.validation_loss, abs=1e-3)
    assert resumed[0][0] == pytest.approx(loss, abs=1e-5 if policy == "zero_offload" else 1e-2)


def test_damaged_part_is_reported(two_ranks: RankProcesses, tmp_path: Path) -> None:
    two_ranks.call(as_rank, replace(TINY, fsdp=True, steps=7, save_every=4, out=str(tmp_path)))
    earlier, last = (next(tmp_path.glob(f"step-{step:06d}-*")) for step in (4, 7))
    part = next(last.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    damage = f"the content of {part.name} is not what was written; resume from the one before it, {earlier}"
    with pytest.raises(CheckpointError, match=re.escape(damage)):
        load_checkpoint(last)
    load_checkpoint(earlier)
    (earlier / "run.pt").unlink()
    with pytest.raises(CheckpointError, match=r"its run\.pt is missing; no good one before it"):
        load_checkpoint(earlier)


def full_disk(rank: int, config: TrainConfig) -> None:
    with interrupted(os.replace, OSError("no space left")):
        train(config, text=text())


def test_failed_save_raises_on_each_rank(two_ranks: RankProcesses, tmp_path: Path) -> None:
    for message in messages(two_ranks.outcomes(full_disk, replace(TINY, fsdp=True, out=str(tmp_path)))):
        assert "no space left" in message


def test_sharding_needs_torchrun() -> None:
    with pytest.raises(ValueError, match=r"--fsdp shards .* torchrun --standalone --nproc-per-node 1"):
        train(replace(TINY, fsdp=True), text=text())


def test_whole_run_does_not_resume_sharded(two_ranks: RankProcesses, tmp_path: Path) -> None:
    config = replace(TINY, fsdp=True, steps=5, save_every=4, out=str(tmp_path))
    two_ranks.call(as_rank, config)
    middle = next(tmp_path.glob("step-000004-*"))
    with pytest.raises(ValueError, match="fsdp=False differs from the checkpoint's True"):
        train(replace(config, fsdp=False, resume=str(middle)), text=text())
    started = replace(config, fsdp=False, start_from=str(middle), out=None)
    weights = dict(initial_model(started).named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(str(middle)).items())
