"""What a steady step calls of the driver and the runtime, under Inductor's real CUDA code and Triton's launcher.

Nothing computes here: order, waits, copies and allocations are what counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu.environment import Call, count, on_fake_gpu, read_calls, run

pytestmark = on_fake_gpu

WEIGHTS = {"policy": "zero_offload", "offload_weights": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip": {"clip": True},
    "re-select": {"clip": True, "options": {"select_interval": 4}},
    "one step late": {"options": {"staleness": 1}},
    "zero_offload": {"options": {"policy": "zero_offload"}},
    "weights": {"options": WEIGHTS},
    "weights of a second model": {"options": WEIGHTS, "second": True},
    "int8": {"options": {"gradient_transfer": "int8"}},
    "mean": {"clip": True, "options": {"gradient_transfer": "mean"}},
    "8-bit moments": {"options": {"state_dtype": "fp8"}},
}
OTHERS: dict[str, dict[str, Any]] = {
    name: {"model": name, "clip": True, "options": {"min_offload_size": 1}}
    for name in ("conv_batch_norm", "experts_without_tokens")
}
WAITS = {"cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize"}
ALLOCATIONS = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemHostAlloc", "cudaHostRegister"}
LOADS = {"cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"}


@dataclass(frozen=True)
class Steps:
    """What the steps after a warm-up called.

    Attributes:
        gradients: that were offloaded in them; steps: how many there were.
        code: that Inductor generated, forward and backward.
        compiled_ahead, compiled_at_launch: variants of our kernels, of the warm-up, too.
    """

    calls: list[Call]
    gradients: int
    steps: int
    code: list[str]
    compiled_ahead: int
    compiled_at_launch: int

    def of(self, names: set[str], kind: str | None = None) -> int:
        return sum(count(self.calls, name, kind) for name in names)


Measure = Callable[..., Steps]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Runs a case; the same one is run once."""
    known: dict[str, Steps] = {}

    def measured(case: str, *, pause: bool = False, queue: int | None = None) -> Steps:
        given = json.dumps((CASES | OTHERS)[case] | {"pause": pause})
        key = f"{given} {queue}"
        if key not in known:
            path = tmp_path_factory.mktemp("steady") / "calls"
            arguments = ["-m", "tests.fake_gpu.programs.steady_steps", str(path), given]
            # Kernels that take 50 times as long as their launches: the queue is full for sure.
            switches = {} if queue is None else {"QUEUE": str(queue), "KERNEL_NS": "2000000"}
            done = run(arguments, computes=False, triton="launch", switches=switches)
            assert done.returncode == 0, done.stdout[-4000:]
            found = json.loads(done.stdout.splitlines()[-1])
            gradients = found["offloaded"] * found["steps"]
            compiled = found["compiled ahead"], found["compiled at a launch"]
            known[key] = Steps(read_calls(path), gradients, found["steps"], found["code"], *compiled)
        return known[key]

    return measured


@pytest.mark.parametrize("case", CASES)
def test_host_waits_for_the_step_before_last_alone(measure: Measure, case: str) -> None:
    steps = measure(case)
    assert steps.of(WAITS - {"cudaEventSynchronize"}) == 0
    assert steps.of({"cudaEventSynchronize"}, "") <= steps.steps
    assert {each.name for each in steps.calls if each.kind.startswith("blocked")} <= {"cudaEventSynchronize"}
    assert not [each for each in steps.calls if "pageable" in each.kind]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_allocated_or_loaded(measure: Measure, case: str) -> None:
    steps = measure(case)
    assert steps.of(ALLOCATIONS) == 0
    assert steps.of(LOADS) == 0


@pytest.mark.parametrize("case", CASES)
def test_no_launch_waits_for_a_compilation(measure: Measure, case: str) -> None:
    steps = measure(case)
    assert steps.compiled_ahead >= 5
    assert steps.compiled_at_launch == 0


@pytest.mark.parametrize("case", CASES)
def test_device_goes_idle_while_no_python_runs(measure: Measure, case: str) -> None:
    """The device is held until the forward, the backward and the step are queued.

    Then a C function with Python's lock lets it go on, and waits for all streams. A stream that waited for a job that
    Python must run would never end; the fake GPU aborts such a process.
    """
    steps = measure(case, pause=True)
    assert steps.of({"paused"}, "blocked with the GIL") > 0
    assert steps.of({"paused"}, "blocked") == 0


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_keep_the_contracts(measure: Measure, case: str) -> None:
    steps = measure(case)
    if case != "experts_without_tokens":  # its router waits: it reads how many tokens each expert has
        assert steps.of(WAITS - {"cudaEventSynchronize"}) == 0
    assert not [each for each in steps.calls if "pageable" in each.kind]
    assert steps.of(ALLOCATIONS) == 0
    assert steps.of(LOADS) == 0
    # Experts without tokens have no gradient.
    assert 0 < count(steps.calls, "kernel", "_norms_and_split_kernel") <= steps.gradients
    for code in steps.code:
        assert not [call for call in calls_of(code) if COPY.search(call)]


@pytest.mark.parametrize("queue", [8, 40])
@pytest.mark.parametrize("case", ["clip", "weights"])
def test_full_queue_stops_no_step(measure: Measure, case: str, queue: int) -> None:
    """Launches wait for room in the queue, and whatever makes room does not wait for them."""
    steps = measure(case, queue=queue)
    assert [each for each in steps.calls if each.kind.startswith("blocked") and "Launch" in each.name]


def test_work_per_gradient(measure: Measure) -> None:
    """Two kernels, one copy, three events that were there: what a gradient costs the threads that send it."""
    steps = measure("defaults")
    kernels = {"_norms_and_split_kernel": 1, "update_slices": 1, "_place_slices_kernel": 1}
    for name, most in kernels.items():
        assert count(steps.calls, "kernel", name) <= most * steps.gradients
    assert count(steps.calls, "kernel", "_norms_and_split_kernel") == steps.gradients
    assert count(steps.calls, "cudaMemcpyAsync", "D2H") <= 1.2 * steps.gradients
    assert steps.of({"cuStreamWriteValue32"}) <= 1.5 * steps.gradients
    assert steps.of({"cudaEventRecord"}) <= 3 * steps.gradients
    assert steps.of({"cudaEventCreate"}) <= 4 * steps.steps
    assert steps.of({"cudaStreamWaitEvent"}) <= 2 * steps.gradients


COPY = re.compile(r"primals_\d+\.clone|copy_\(primals|clone\.default\(primals")
"""Of a parameter."""
OP = re.compile(r"torch\.ops\.zenflow\.(\w+)\.default\((.*)\)")


def calls_of(code: str) -> list[str]:
    """The statements of a graph's ``call``."""
    body = code[code.index("def call(self, args):") :]
    lines = [line.strip() for line in body[: body.index("\n        return (")].splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "del ", "assert", "args.clear"))]


@pytest.mark.parametrize("case", ["defaults", "weights"])
def test_generated_code_copies_no_parameter(measure: Measure, case: str) -> None:
    for code in measure(case).code:
        calls = calls_of(code)
        assert sum("torch.cuda._DeviceGuard" in call for call in calls) == 1
        assert not [call for call in calls if COPY.search(call)]


@pytest.mark.parametrize("case", ["defaults", "weights"])
def test_generated_code_keeps_our_order(measure: Measure, case: str) -> None:
    """Updates are fetched in front of a weight's first use; it is read only between load and unload."""
    forward, backward = measure(case).code
    offloaded = 0
    for code in (forward, backward):
        fetched: set[str] = set()
        loaded: set[str] = set()
        weights = {name for _, given in map_ops(calls_of(forward), "fetch_parameters_") for name in primals(given)}
        for call in calls_of(code):
            if "async_compile" in call or "= args" in call:
                continue
            found = OP.search(call)
            if found is None:
                for name in set(primals(call)) & weights:
                    assert code is backward or name in fetched, call
                    assert case != "weights" or name in loaded, call
            elif found[1] == "fetch_parameters_":
                fetched |= set(primals(found[2]))
            elif found[1] == "load_weight_":
                loaded |= set(primals(found[2]))
            elif found[1] == "unload_weight_":
                loaded -= set(primals(found[2]))
            elif found[1] == "offload_gradients":
                offloaded += len(re.findall(r"\bbuf\d+", found[2].partition("]")[0]))
        assert not loaded
        assert weights
    assert offloaded >= 14


def primals(text: str) -> list[str]:
    return re.findall(r"\bprimals_\d+\b", text)


def map_ops(calls: list[str], name: str) -> list[tuple[str, str]]:
    found = (OP.search(call) for call in calls)
    return [(each[1], each[2]) for each in found if each is not None and each[1] == name]


def test_gradients_leave_before_the_next_layer(measure: Measure) -> None:
    """The weight gradients of a layer are handed over before the backward has ended, not all at its end."""
    calls = calls_of(measure("defaults").code[1])
    handed = [index for index, call in enumerate(calls) if "offload_gradients" in call]
    products = [index for index, call in enumerate(calls) if "extern_kernels.mm" in call]
    assert len(handed) >= 2
    assert handed[0] < products[len(products) // 2 + 3]


def test_calls_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("cudaMemcpyAsync\tD2H\tpython\t3\t96\nkernel\tadd\t\t2\t0\n")
    calls = read_calls(tmp_path / "calls")
    assert calls == [Call("cudaMemcpyAsync", "D2H", "python", 3, 96), Call("kernel", "add", "", 2, 0)]
    assert count(calls, "cudaMemcpyAsync") == count(calls, "cudaMemcpyAsync", "D2H") == 3
    assert count(calls, "cudaMemcpyAsync", "H2D") == 0
