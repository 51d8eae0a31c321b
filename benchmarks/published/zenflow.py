"""ZenFlow (arXiv 2505.12242) and DeepSpeed's blog on its core binding.

Both are DeepSpeed: its updates begin after the whole backward. Its ZenFlow flushes all windows in one step and applies
them at the next flush; here windows of four steps are staggered, applied one step late, and no parameter is resident.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.published.claim import Claim
from benchmarks.published.testbeds import H100_RATES, steady, with_host_rate
from zenflow_compile.performance.hardware import Hardware, hardware
from zenflow_compile.performance.models import model
from zenflow_compile.prediction.simulate import SteadyStep

PAPER = "ZenFlow (arXiv 2505.12242)"
BLOG = "DeepSpeed, blogs/zenflow-corebinding"

_LLAMA = "llama2-7b"
_PUBLISHED_UPDATE_S = 4.0
_FILES: dict[str, Any] = {"policy": "zero_infinity", "nvme_path": "scratch"}
_RESIDENT: dict[str, Any] = {"policy": "resident"}
_OFFLOAD: dict[str, Any] = {"policy": "zero_offload"}
_ZENFLOW: dict[str, Any] = {"policy": "zenflow"}
_DEEPSPEED_ZENFLOW: dict[str, Any] = {"policy": "zenflow", "staleness": 1, "device_share": 0.0}

_BASIS = (
    "Llama-2-7B, 4x A100-40G of planning.hardware, 2048 tokens per device (assumption: the paper states none); host "
    "update 4 s, as the paper states for its own"
)

DGX_SOURCE = "the blog's: 2x EPYC 7742, 64 cores and 8 channels DDR4-3200 each (AMD), times 0.8; 1 TB"


def claims(node: Hardware | None = None) -> list[Claim]:
    """All of both; ``node`` stands for the 4x A100 of the paper."""
    a100 = hardware("4xa100-40g-pcie4") if node is None else node
    return [*_traffic(), *_llama(a100), *_blog()]


def traffic(topk_ratio: float, update_interval: int) -> float:
    """Model sizes over the link: deferred gradients at every step, their weights once per update window."""
    return (1 - topk_ratio) * (1 + 1 / update_interval)


def _traffic() -> list[Claim]:
    matrices = [spec.shape for spec in model(_LLAMA).params if len(spec.shape) == 2]
    elements = sum(rows * columns for rows, columns in matrices)
    norms = sum(columns for _, columns in matrices)
    cases = (
        ("traffic per step", "model sizes", 1.13, traffic(0.1, 4), "topk_ratio 0.1, update_interval 4", ""),
        ("traffic of ZeRO-Offload", "model sizes", 2.0, traffic(0.0, 1), "a gradient and a weight", ""),
        (
            "what 13B moves per step",
            "GB",
            40.0,
            2 * 2 * 13.0,
            "13 billion parameters, bf16",
            "Gradients out and weights in are two bytes each; the published number is three quarters of that.",
        ),
        (
            "seconds of that over PCIe at 32 GB/s",
            "s",
            1.0,
            2 * 2 * 13.0 / 32,
            "13 billion parameters, bf16",
            "Published as more than 1 s, from 40 GB.",
        ),
        (
            "gradients over column norms, Llama-2-7B",
            "times",
            4000.0,
            elements / norms,
            "shapes of Llama-2-7B",
            "The published number is that of a matrix with 4096 rows; up-projections and head have more.",
        ),
    )
    return [
        Claim(
            where=PAPER,
            claim=claim,
            unit=unit,
            published=published,
            predicted=predicted,
            basis=basis,
            sentence=sentence,
        )
        for claim, unit, published, predicted, basis, sentence in cases
    ]


def _llama(a100: Hardware) -> list[Claim]:
    owned = model(_LLAMA).numel / a100.devices
    stated = with_host_rate(a100, owned / _PUBLISHED_UPDATE_S, "ZenFlow, its Llama-2-7B: more than 4 s on the CPU")

    def deepspeed(options: dict[str, Any], node: Hardware = stated) -> SteadyStep:
        return steady(_LLAMA, node, final_at_step=True, **options)

    def own(options: dict[str, Any]) -> SteadyStep:
        return steady(_LLAMA, a100, final_at_step=False, **options)

    resident, offload, zenflow = (deepspeed(each) for each in (_RESIDENT, _OFFLOAD, _DEEPSPEED_ZENFLOW))
    own_offload, own_zenflow = own(_OFFLOAD), own(_ZENFLOW)
    unstated = "The paper does not state its batch, and the share of the peak that is reached is an assumption."
    backward = offload.seconds - offload.host_update
    rest = (
        f"Beside the 4 s of update, forward, backward and copies take {backward:.1f} s in the model; the paper has a "
        "backward of about 2 s, with a batch that it does not state."
    )
    machine_update = deepspeed(_OFFLOAD, a100).host_update
    disk = (
        "The paper states no disk. With the state in files of two SSDs the disk alone takes "
        f"{deepspeed(_FILES).seconds - offload.seconds:.0f} s of a step; a factor near ZeRO-Offload's means that the "
        "published runs kept the state in host memory, or had far faster disks."
    )
    cases = (
        ("step without offloading", "s", 0.5, resident.seconds, own(_RESIDENT).seconds, unstated),
        ("step of ZeRO-Offload", "s", 7.0, offload.seconds, own_offload.seconds, rest),
        ("ZenFlow over ZeRO-Offload", "times", 5.0, _over(offload, zenflow), _over(own_offload, own_zenflow), ""),
        (
            "ZenFlow over ZeRO-Infinity",
            "times",
            6.3,
            _over(deepspeed(_FILES), zenflow),
            _over(own(_FILES), own_zenflow),
            disk,
        ),
        (
            "stalls less than ZeRO-Offload's",
            "share",
            0.85,
            1 - zenflow.stall / offload.stall,
            1 - own_zenflow.stall / own_offload.stall,
            "",
        ),
    )
    found = [
        Claim(
            where=f"{PAPER}, Llama-2-7B on 4x A100" if unit == "s" else f"{PAPER}, abstract",
            claim=claim,
            unit=unit,
            published=published,
            predicted=predicted,
            ours=ours,
            basis=_BASIS,
            sentence=sentence,
        )
        for claim, unit, published, predicted, ours, sentence in cases
    ]
    update = Claim(
        where=f"{PAPER}, Llama-2-7B on 4x A100",
        claim="update on the host",
        unit="s",
        published=_PUBLISHED_UPDATE_S,
        predicted=machine_update,
        ours=own_offload.host_update,
        basis="4x A100-40G of planning.hardware with this project's host kernel: no rate is stated but this number",
        sentence="This project's kernel takes what the host's memory allows; the published one has a third of that.",
    )
    return [*found, update]


def _over(slow: SteadyStep, fast: SteadyStep) -> float:
    return slow.seconds / fast.seconds


def dgx() -> Hardware:
    """The blog's machine: two of the A100 of a DGX, the whole host."""
    a100 = hardware("4xa100-40g-pcie4")
    sources = {**a100.sources} | dict.fromkeys(("host_bandwidth", "cores", "host_bytes"), DGX_SOURCE)
    return replace(
        a100, devices=2, cores=128, host_bytes=1e12, host_bandwidth=0.8 * 16 * 25.6e9, name="2xa100", sources=sources
    )


def _blog() -> list[Claim]:
    """Milliseconds with cores bound by DeepSpeed; four sequences of 512 tokens per device, gradients clipped."""
    node = dgx()
    rate = 1 / (1 / H100_RATES["cpu_update"] + 1 / H100_RATES["cpu_downscale"])
    stated = with_host_rate(node, rate, "Deep Optimizer States, H100 testbed")
    offloaded = (
        "The blog states no rate of its host's update; the one taken is a newer host's. Its steps would fit 0.7 "
        "billion parameters/s per device, and the logs of Deep Optimizer States have 0.75 on another EPYC."
    )
    hidden = (
        "The README of DeepSpeed's example has closes of 1.9 to 2.2 s between steps of 0.7 s: they are not hidden "
        "there, as they are in the model."
    )
    plain = "The share of the peak that short sequences reach is less than was assumed."
    cases = (
        ("qwen2.5-3b", "ZeRO-Offload", 2497.0, _OFFLOAD, _OFFLOAD, offloaded),
        ("qwen2.5-3b", "ZenFlow", 1232.0, _DEEPSPEED_ZENFLOW, _ZENFLOW, hidden),
        ("qwen2.5-3b", "ZenFlow with its newer binding", 1116.0, _DEEPSPEED_ZENFLOW, _ZENFLOW, hidden),
        ("qwen2.5-1.5b", "ZeRO-2 without offloading", 240.0, _RESIDENT, _RESIDENT, plain),
        ("qwen2.5-1.5b", "ZeRO-Offload", 1365.0, _OFFLOAD, _OFFLOAD, offloaded),
        ("qwen2.5-1.5b", "ZenFlow with its newer binding", 569.0, _DEEPSPEED_ZENFLOW, _ZENFLOW, hidden),
    )
    found = []
    for name, system, published, theirs, own, sentence in cases:
        predicted = 1e3 * steady(name, stated, context=512, final_at_step=True, **theirs).seconds
        ours = 1e3 * steady(name, node, context=512, final_at_step=True, **own).seconds
        found.append(_of_blog(f"step of {system}, {name}", "ms", published, predicted, ours, sentence))
    offload, zenflow = found[:2]
    assert offload.ours is not None
    assert zenflow.ours is not None
    ratio = offload.predicted / zenflow.predicted
    own_ratio = offload.ours / zenflow.ours
    return [*found, _of_blog("ZenFlow over ZeRO-Offload, qwen2.5-3b", "times", 2497 / 1232, ratio, own_ratio, hidden)]


def _of_blog(claim: str, unit: str, published: float, predicted: float, ours: float, sentence: str) -> Claim:
    return Claim(
        where=f"{BLOG}, 2x A100-40G, cores bound",
        claim=claim,
        unit=unit,
        published=round(published, 2),
        predicted=predicted,
        ours=ours,
        basis=f"{DGX_SOURCE}; its script's 4 sequences of 512 per device; U_c and D_c of Deep Optimizer States' H100",
        sentence=sentence,
    )
