"""Every system trains the same model in the same way, as far as its rule allows."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from benchmarks.systems.case import DEEPSPEED, SEVERAL_RANKS_ONLY, Case
from benchmarks.systems.deepspeed_system import configuration
from benchmarks.systems.process import DEEPSPEED_PYTHON, TrainingWorker, WorkerError
from benchmarks.systems.worker import Trainer

STEPS = 8

needs_deepspeed = pytest.mark.skipif(
    not DEEPSPEED_PYTHON.exists(), reason="DeepSpeed's environment is missing; scripts/setup_deepspeed.sh makes it"
)


def losses(system: str, **changes: object) -> list[float]:
    case = Case(system=system, model="tiny", inner="eager", **changes)  # type: ignore[arg-type]
    trainer = Trainer(case)
    with closing(trainer.system):
        found: list[float] = trainer.run(settle=2, steps=STEPS - 2)["loss"]
    return found


@pytest.fixture(scope="module")
def adamw() -> list[float]:
    return losses("adamw")


@pytest.mark.parametrize("system", ["resident", "zero_offload"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_exact_policies_train_as_adamw(system: str, clip: float | None) -> None:
    assert losses(system, clip=clip) == pytest.approx(losses("adamw", clip=clip), rel=1e-5)


def test_zenflow_trains_nearly_as_adamw(adamw: list[float]) -> None:
    zenflow = losses("zenflow", update_interval=2)
    assert zenflow != adamw
    assert zenflow == pytest.approx(adamw, rel=0.01)
    assert losses("zenflow", update_interval=1) == pytest.approx(adamw, rel=1e-5)


def test_masters_keep_updates_that_bf16_would_lose(adamw: list[float]) -> None:
    assert losses("adamw", dtype="bf16") == pytest.approx(adamw, rel=0.01)


def test_forward_and_backward_alone_train_nothing() -> None:
    untrained = losses("forward_backward")
    assert untrained[:4] == pytest.approx(untrained[4:8])


def test_facts_name_the_place_of_state() -> None:
    trainer = Trainer(Case(system="zenflow", model="tiny", inner="eager"))
    with closing(trainer.system):
        trainer.run(settle=0, steps=4)
        facts = trainer.facts()
        profiled = trainer.profile(steps=4)
    assert facts["parameters"] == 3 * (128 * 128 + 128)
    assert 0.1 < facts["resident_share"] < 0.2
    assert len(profiled["stall_ms"]) == 4
    assert profiled["summary"]["policy"] == "zenflow"


def test_deepspeed_configs_differ_in_one_section() -> None:
    offload, zenflow = (configuration(Case(system=name, model="tiny", clip=1.0), rows=8) for name in DEEPSPEED)
    block = zenflow["zero_optimization"].pop("zenflow")
    assert zenflow == offload
    assert (block["update_interval"], block["overlap_step"]) == (4, True)
    assert offload["gradient_clipping"] == 1.0
    assert offload["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("system", ["zero_offload", *SEVERAL_RANKS_ONLY])
def test_two_ranks_train_comparably(system: str) -> None:
    """In every form of several ranks: the same losses of the first one, and bytes that are counted."""
    found = []
    for each in ("adamw", system):
        case = Case(system=each, model="tiny", inner="eager", cores=(0,), ranks=2, update_interval=1)
        with TrainingWorker(case, warm_up=STEPS) as worker:
            worker.start()
            assert worker.run(settle=1, steps=4)[0] > 0
            found.append(worker.losses)
            assert worker.network_bytes[0] > worker.ask("facts")["parameters"]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@needs_deepspeed
@pytest.mark.parametrize("system", DEEPSPEED)
def test_deepspeed_trains_comparably(system: str, adamw: list[float]) -> None:
    case = Case(system=system, model="tiny", inner="eager", cores=(0,))
    with TrainingWorker(case, warm_up=STEPS) as worker:
        worker.start()
        found = worker.losses
        facts = worker.ask("facts")
    assert facts["versions"]["deepspeed"]
    if system == "deepspeed_zero_offload":
        assert found == pytest.approx(adamw, rel=1e-4)
    else:  # its late updates at a fourth of the rate move the loss less, but down
        assert found[4] < found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("system", ["adamw", "zero_offload", "torchao_offload", "fsdp2_offload"])
def test_exact_systems_train_alike_on_cuda(system: str) -> None:
    def found(name: str) -> list[float]:
        case = Case(system=name, model="tiny", inner="eager", device="cuda")
        with TrainingWorker(case, warm_up=STEPS) as worker:
            worker.start()
            assert worker.run(settle=1, steps=4)[0] > 0
            assert worker.ask("facts")["device_peak_mib"] > 0
            return worker.losses

    try:
        assert found(system) == pytest.approx(found("adamw"), rel=1e-3)
    except WorkerError as error:
        if error.kind != "missing":
            raise
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capped_process_runs_out_of_memory() -> None:
    case = Case(system="adamw", model="optimizer-bound", inner="eager", device="cuda", memory_bytes=64 * 2**20)
    with TrainingWorker(case, warm_up=2) as worker, pytest.raises(WorkerError) as error:
        worker.start()
    assert error.value.kind == "memory"
