"""The parts of ``gpu_evidence``, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.evidence import compared, gpu_tests, syncs, trace
from benchmarks.evidence.loop import MODEL
from benchmarks.evidence.planned import together_bytes
from benchmarks.evidence.setting import Emit, Setting
from benchmarks.systems.case import Case


@dataclass(frozen=True, slots=True)
class Part:
    """Something to measure, in a process of its own.

    Attributes:
        minutes: an estimate for an H100 with 16 cores, with an empty compiler cache; nothing depends on it.
        cases: systems that it would like to run beside each other.
    """

    name: str
    summary: str
    minutes: float
    measure: Callable[[Setting, Emit], None]
    cases: tuple[Case, ...] = ()

    @property
    def planned_gb(self) -> float | None:
        """Device memory of all ``cases`` at once, in 1e9 bytes; None if there are none."""
        return together_bytes(self.cases) / 1e9 if self.cases else None


MACHINE = Part("machine", "findings of `zenflow-compile doctor`, which every part has", 1, compared.measure_machine)
_POLICIES = ("zenflow", "zero_offload")
_OTHERS = ("torchao_offload", "fsdp2_offload")


def _peers() -> Iterator[Part]:
    """One part has both policies, unless the steps are so long that it would not end in time."""
    for tokens, minutes in ((8192, 6), (4096, 6), (16384, 8), (32768, 7)):
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
    beside = (compared.ALONE, "adamw", systems[0])
    cases = tuple(Case(system=each, model=MODEL, tokens=tokens, dtype="bf16") for each in beside)
    return Part(name, f"{summary}, Qwen2.5-3B's shapes", minutes, work, cases)


def _tests_part(name: str, summary: str, minutes: float, files: Sequence[str]) -> Part:
    return Part(name, f"tests that need a GPU: {summary}", minutes, partial(gpu_tests.measure, files=files))


# In the order of their value: what a machine that is lent for minutes should show first.
PARTS = {
    part.name: part
    for part in (
        MACHINE,
        Part("syncs", "waits of the host for the device per step: steady, clipped, re-selecting", 4, syncs.measure),
        *_peers(),
        _tests_part("gpu_training", "training under every policy", 3, gpu_tests.TRAINING),
        Part("trace", "CUPTI traces of single steps: busy time per stream, overlap of copies", 4, trace.measure_trace),
        Part("profiler", "steps with and without zf.profile()", 4, trace.measure_profiler),
        _tests_part("gpu_weights", "weights in host memory", 2, gpu_tests.WEIGHTS),
        _tests_part("gpu_kernels", "Triton kernels", 3, gpu_tests.KERNELS),
        _tests_part("gpu_others", "errors of the device, ranks, the runtime's parts", 3, gpu_tests.OTHERS),
        Part("policies_stride", "strides of deep_optimizer_states, and Equation 1's", 7, compared.measure_strides),
        Part("host_adam", "host updates with 1 to 16 workers", 5, compared.measure_host_adam),
    )
}
