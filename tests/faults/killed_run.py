"""A training run that can be killed at any time: ``python -m tests.faults.killed_run FOLDER POLICY STEPS``.

It goes on from the last checkpoint in the folder, and writes the weights there when it is done.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.support.training import EAGER_BACKEND, LARGEST_STATE, Training
from zenflow_compile.runtime.parameters import host_weights

LARGEST_WEIGHT = 4 * 32 * 32
EVERY = 5  # steps per checkpoint


def main(folder: Path, policy: str, steps: int) -> None:
    options = {"policy": policy, "workers": 1}
    if weights_in_files := policy == "weights in files":
        host_weights.SMALLEST_WEIGHT_BYTES = 1
        options.update(policy="zero_infinity", offload_weights=1.0, offload_device="nvme_all")
    if policy == "deep_optimizer_states":
        options["update_stride"] = 2  # a measured one may be another after a kill, and with it where a subgroup rounds
    if policy == "zero_infinity" or weights_in_files:
        options.update(nvme_path=str(folder), host_window_bytes=LARGEST_STATE + weights_in_files * LARGEST_WEIGHT)
    training, checkpoint, begin = Training(EAGER_BACKEND, options), folder / "checkpoint", 0
    if checkpoint.exists():
        number, _, saved = checkpoint.read_bytes().partition(b"\n")
        begin = int(number)
        training.load(saved)
    print("training", flush=True)
    for step in range(begin, steps):
        training.step(step)
        if (step + 1) % EVERY == 0:
            (folder / "new").write_bytes(b"%d\n" % (step + 1) + training.saved())
            os.replace(folder / "new", checkpoint)
    torch.save(training.weights(), folder / "new")
    training.optimizer.close()
    os.replace(folder / "new", folder / "weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
