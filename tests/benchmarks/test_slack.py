"""The emulation runs end to end; how long anything takes is for the benchmark itself."""

from __future__ import annotations

import torch

from benchmarks import slack


def test_placement_changes_time_but_no_weight() -> None:
    weights = {}
    for run in slack.runs()[:4]:
        measured, weights[run.name] = slack.train(run, slack.KEPT + 4, 0.0, 6, width=16)
        assert measured["step_ms"] > 0
    first, *others = weights.values()
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert not any(torch.equal(weight, torch.zeros_like(weight)) for weight in first)


def test_targets_name_every_miss() -> None:
    rows = [
        {"run": run.name, "clipping": run.clipping, "weights_bitwise_equal": True, "stall_share": 0.5}
        for run in slack.runs()
    ]
    assert [target.met for target in slack.targets(rows)] == [False, False, True, True, True]
    rows[0] |= {"stall_share": 0.01, "weights_bitwise_equal": False}
    assert [target.met for target in slack.targets(rows)] == [True, False, True, True, False]
