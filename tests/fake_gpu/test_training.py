"""Training on the fake GPU gives the CPU's bits, whatever the driver refuses, and says what it costs."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from tests.fake_gpu.environment import on_fake_gpu, run
from tests.support.zoo import BY_NAME

pytestmark = on_fake_gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one step late": {"staleness": 1},
    "mean": {"gradient_transfer": "mean"},
    "int8": {"gradient_transfer": "int8"},
    "re-select": {"select_interval": 4},
    "zero_offload": {"policy": "zero_offload"},
    "twinflow": {"policy": "twinflow", "ratio": 0.5},
    "strides": {"policy": "deep_optimizer_states", "update_stride": 2},
    "bf16 moments": {"state_dtype": "bf16"},
    "8-bit moments": {"state_dtype": "fp8"},
    "weights": {"policy": "zero_offload", "offload_weights": 1.0},
    "adaptive": {"update_interval": (2, 6)},
    "files": {"offload_device": "nvme", "nvme_path": "", "host_window_bytes": 1 << 18},
}


def train(
    switches: dict[str, str] | None = None, triton: Literal["off", "interpret"] = "off", **given: Any
) -> dict[str, Any]:
    """Runs the program; what it prints."""
    done = run(["-m", "tests.fake_gpu.programs.training", json.dumps(given)], switches=switches, triton=triton)
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] == (triton == "interpret")
    assert bool(found["in turn"]) == ("nvme_path" in given.get("options", {})), "state takes turns in memory"
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_set_has_the_bits_of_the_cpu(options: str, compiled: bool) -> None:
    found = train(compiled=compiled, clip=True, options=OPTIONS[options])
    # bf16 and 8-bit moments are rounded at random, by the device's numbers on the device.
    assert found["apart"] <= (2e-4 if "moments" in options else 0.0)


@pytest.mark.parametrize("options", ["defaults", "mean", "int8", "twinflow", "re-select"])
def test_our_kernels_train_as_on_the_cpu(options: str) -> None:
    """Triton's interpreter computes our kernels where they are launched: in a run's streams and memory."""
    found = train(triton="interpret", compiled=True, clip=True, options=OPTIONS[options], steps=6)
    # A last bit may round an element to the next int8 value.
    assert found["apart"] <= (1e-4 if options == "int8" else 1e-6)


@pytest.mark.parametrize("model", ["conv_batch_norm", "experts_without_tokens", "llama", "gpt_tied", "mixtral"])
@pytest.mark.parametrize("options", ["defaults", "weights"])
def test_models_train_as_on_the_cpu(options: str, model: str) -> None:
    found = train(compiled=True, clip=True, model=model, options=OPTIONS[options] | {"min_offload_size": 1})
    assert found["apart"] <= BY_NAME[model].tolerance


@pytest.mark.parametrize("options", ["defaults", "zero_offload", "8-bit moments", "files", "re-select"])
def test_offloading_all_changes_no_bit(options: str) -> None:
    found = train(compiled=True, offload_all=7, options=OPTIONS[options])
    assert found["apart"] <= (2e-4 if "moments" in options else 0.0)


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"STREAM_VALUES": "0"}, "stream"),
        ({"REGISTER": "0"}, None),
        ({"PINNED_MB": "1"}, "ulimit -l"),
        ({"PINNED_MB": "1", "REGISTER": "0"}, "ulimit -l"),
        ({"QUEUE": "8"}, None),
        ({"QUEUE": "40"}, None),
        ({"QUEUE": "1000", "KERNEL_NS": "200000"}, None),
    ],
    ids=lambda value: "-".join(map("=".join, value.items())) if isinstance(value, dict) else "",
)
def test_refusals_change_no_bit(switches: dict[str, str], said: str | None) -> None:
    """What makes training slower is said once, with the driver's reason; what does not is not mentioned."""
    found = train(switches, compiled=True, clip=True)
    assert found["apart"] == 0.0
    about = [each for each in found["warnings"] if said is not None and said in each]
    assert len(about) == (said is not None), found["warnings"]
    assert len(found["warnings"]) == len(about)


def test_model_on_the_second_device_trains_alike() -> None:
    """The first one is the current device all the time."""
    assert train({"DEVICES": "2"}, compiled=True, device=1)["apart"] == 0.0


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"DEVICES": "0"}, "No CUDA GPUs are available"),
        ({"DRIVER": "12040"}, "driver on your system is too old"),
        ({"LARGEST_MB": "1"}, "out of memory"),
    ],
    ids=["no device", "old driver", "fragmented"],
)
def test_what_cannot_work_is_said_in_a_sentence(switches: dict[str, str], said: str) -> None:
    done = run(["-m", "tests.fake_gpu.programs.training", "{}"], switches=switches)
    assert done.returncode != 0
    assert said in done.stdout
