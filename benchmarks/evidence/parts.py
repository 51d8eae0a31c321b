"""The parts of ``gpu_evidence``, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.evidence import compared, gpu_tests, syncs, trace
from benchmarks.evidence.loop import MODEL
from benchmarks.evidence.setting import Emit, Setting


@dataclass(frozen=True, slots=True)
class Part:
    """Something to measure, in a process of its own.

    Attributes:
        minutes: an estimate for an H100 with 16 cores, with an empty compiler cache; nothing depends on it.
    """

    name: str
    summary: str
    minutes: float
    measure: Callable[[Setting, Emit], None]


MACHINE = Part("machine", "findings of `zenflow-compile doctor`, which every part has", 1, compared.measure_machine)
_POLICIES = ("zenflow", "zero_offload")
_OTHERS = ("torchao_offload", "fsdp2_offload")


def _peers() -> Iterator[Part]:
    """One part has both policies, unless the steps are so long that it would not end in time."""
    for tokens, minutes in ((4096, 6), (8192, 6), (16384, 8), (32768, 7)):
        for systems in [_POLICIES] if tokens < 32768 else [(each,) for each in _POLICIES]:
            for clip in (False, True):
                name = f"peers_{tokens // 1024}k" + "_zero_offload" * (systems == ("zero_offload",)) + "_clip" * clip
                summary = f"{' and '.join(systems)} next to resident AdamW, {tokens:,} tokens" + ", clipping" * clip
                yield _peers_part(name, summary, minutes, tokens, clip, systems)
    yield _peers_part(
        "peers_4k_others", "torchao and FSDP2 next to resident AdamW, 4,096 tokens", 7, 4096, False, _OTHERS
    )


def _peers_part(name: str, summary: str, minutes: float, tokens: int, clip: bool, systems: Sequence[str]) -> Part:
    work = partial(compared.measure_peers, model=MODEL, tokens=tokens, clip=clip, systems=systems)
    return Part(name, f"{summary}, Qwen2.5-3B's shapes", minutes, work)


PARTS = {
    part.name: part
    for part in (
        MACHINE,
        Part("gpu_tests", "the tests that need a GPU (`make test-gpu`)", 8, gpu_tests.measure),
        Part("syncs", "waits of the host for the device per step: steady, clipped, re-selecting", 4, syncs.measure),
        Part("trace", "CUPTI traces of single steps: busy time per stream, overlap of copies", 4, trace.measure_trace),
        Part("profiler", "steps with and without zf.profile()", 4, trace.measure_profiler),
        *_peers(),
        Part("policies_stride", "strides of deep_optimizer_states, and Equation 1's", 7, compared.measure_strides),
        Part("host_adam", "host updates with 1 to 16 workers", 5, compared.measure_host_adam),
    )
}
