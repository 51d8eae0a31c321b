"""The GPT example on two ranks trains as on one, and its checkpoint continues on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples.settings import TrainConfig
from examples.stdlib_text import Text, load_text
from examples.train_gpt import train
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
