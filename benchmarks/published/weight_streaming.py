"""Systems whose weights are in host memory: MegaTrain (arXiv 2604.05091) and ZeRO-Infinity (arXiv 2104.07857).

Both update on the host behind the whole backward, and recompute activations. So do the predictions, with all large
weights in host memory. MegaTrain counts 6 FLOPs per parameter and token, without those of recomputation.
"""

from __future__ import annotations

from typing import Any

from benchmarks.published.claim import Claim
from benchmarks.published.testbeds import with_unpinned_gradients
from zenflow_compile.performance.hardware import Hardware, hardware
from zenflow_compile.performance.models import model
from zenflow_compile.prediction.forecast import Forecast, forecast
from zenflow_compile.prediction.predict import scenario_of

MEGATRAIN = "MegaTrain (arXiv 2604.05091)"
MEGATRAIN_CODE = "github.com/DLYuanGod/MegaTrain at 919520f"
INFINITY = "ZeRO-Infinity (arXiv 2104.07857)"

_HOST_OF_H200 = 1.5e12  # bytes, as MegaTrain states
_HOST_OF_DGX2 = 1.5e12  # bytes: NVIDIA DGX-2 datasheet
_STREAMED: dict[str, Any] = {"policy": "zero_offload", "offload_weights": 1.0}
_FILES: dict[str, Any] = {"policy": "zero_infinity", "offload_weights": 1.0, "nvme_path": "scratch"}
_FEWER_BYTES: dict[str, Any] = {**_STREAMED, "split_master": True, "state_dtype": "bf16"}
_OVERLAPPED: dict[str, Any] = {"policy": "zenflow", "offload_weights": 1.0, "device_share": 0.0}

_BASIS = (
    "one device of performance.hardware with its whole host; 6 FLOPs per parameter and token; ours is the "
    "policy zenflow with its defaults and device_share=0"
)


def claims(node: Hardware | None = None) -> list[Claim]:
    """All of both; ``node`` stands for the GH200 of MegaTrain."""
    gh200 = hardware("gh200") if node is None else node
    return [*_throughput(gh200), *_memory()]


def _throughput(gh200: Hardware) -> list[Claim]:
    tokens = 64 * 1024
    larger, smaller = (model(name).numel for name in ("qwen2.5-14b", "qwen2.5-7b"))
    there = f"{MEGATRAIN}, Qwen2.5-14B on a GH200"
    batch = "The paper's batch of this run was not found: 64 sequences of 1024 are assumed"
    streamed, baseline = (
        _run("qwen2.5-14b", each, tokens, **_STREAMED) for each in (gh200, with_unpinned_gradients(gh200))
    )
    ours = _run("qwen2.5-14b", gh200, tokens, **_OVERLAPPED)
    single = _run("qwen2.5-7b", hardware("8xh100-80g"), 158 * 1024, **_STREAMED)
    own_single = _run("qwen2.5-7b", hardware("8xh100-80g"), 158 * 1024, **_OVERLAPPED)
    synchronous = (
        f"{batch}. In the model, ZeRO-3's gradients pass an unpinned temporary (as in Deep Optimizer States), and its "
        "weights are prefetched as ours are. The published baseline waits for them."
    )
    return [
        _claim(there, "model FLOP/s", "TFLOP/s", 264.0, _tflops(streamed, larger), _tflops(ours, larger), f"{batch}."),
        _claim(
            there,
            "model FLOP/s of ZeRO-3 with offloading",
            "TFLOP/s",
            143.6,
            _tflops(baseline, larger),
            None,
            synchronous,
        ),
        _claim(
            there, "over ZeRO-3 with offloading", "times", 1.84, baseline.step_s / streamed.step_s, None, synchronous
        ),
        _claim(
            f"{MEGATRAIN_CODE}, README; batch of examples/sft/configs/qwen_7b_1gpu.yaml",
            "model FLOP/s, Qwen2.5-7B on an H100",
            "TFLOP/s",
            272.0,
            _tflops(single, smaller),
            _tflops(own_single, smaller),
            "",
        ),
    ]


def _memory() -> list[Claim]:
    h200, numel = hardware("8xh200-141g"), model("qwen2.5-72b").numel
    streamed, fewer, files = (
        _run("qwen2.5-72b", h200, 1024, **options) for options in (_STREAMED, _FEWER_BYTES, _FILES)
    )
    v100 = hardware("4xv100-32g")
    no_master = (
        "MegaTrain has no fp32 master of a weight: weights and gradients in bf16, two moments in fp32. Here the master "
        "takes 4 bytes more. Ours: split masters and bf16 moments."
    )
    on_disk = (
        "Here weights, new weights and gradients are in host memory and only the state is in files (weights in files "
        "are not predicted yet); ZeRO-Infinity has all of them on the disk, and 16 GPUs that divide them."
    )
    return [
        _claim(
            f"{MEGATRAIN_CODE}, README",
            "host memory per billion parameters",
            "GB",
            12.0,
            _host_bytes(streamed, numel),
            _host_bytes(fewer, numel),
            no_master,
        ),
        _claim(
            f"{MEGATRAIN}, abstract: one H200 with 1.5 TB of host memory",
            "largest model",
            "1e9 parameters",
            120.0,
            _HOST_OF_H200 / 1e9 / _host_bytes(streamed, numel),
            _HOST_OF_H200 / 1e9 / _host_bytes(fewer, numel),
            no_master,
        ),
        _claim(
            f"{INFINITY}, abstract: one DGX-2 with 1.5 TB of host memory",
            "largest model",
            "1e9 parameters",
            1000.0,
            _HOST_OF_DGX2 / 1e9 / _host_bytes(files, numel),
            None,
            on_disk,
        ),
        _claim(
            f"{INFINITY}, abstract: 512 V100, 25 PFLOP/s",
            "FLOP/s of a device",
            "TFLOP/s",
            49.0,
            v100.device_flops * v100.utilization / 1e12,
            None,
            "The share of the peak that is reached is an assumption, from Megatron-LM on V100.",
        ),
    ]


def _claim(
    where: str, claim: str, unit: str, published: float, predicted: float, ours: float | None, sentence: str
) -> Claim:
    return Claim(
        where=where,
        claim=claim,
        unit=unit,
        published=published,
        predicted=predicted,
        ours=ours,
        basis=_BASIS,
        sentence=sentence,
    )


def _run(name: str, node: Hardware, tokens: int, **options: Any) -> Forecast:
    """A step with the whole node's host for one device, in sequences of 1024; activations are recomputed."""
    scenario = scenario_of(name, node, tokens=tokens, sequence=1024, devices=1, recompute=True, **options)
    return forecast(scenario.options, scenario)


def _tflops(found: Forecast, numel: int) -> float:
    """As MegaTrain counts them."""
    return 6 * numel * found.tokens_per_s / 1e12


def _host_bytes(found: Forecast, numel: int) -> float:
    """Bytes of host memory per parameter."""
    return found.host_bytes / numel
