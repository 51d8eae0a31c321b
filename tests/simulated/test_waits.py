"""Waits that no run needs as long as the others hold: each is tested by itself."""

from __future__ import annotations

import gc

import torch

from tests.simulated.accelerator import serve
from tests.simulated.cases import Case, Loop
from tests.simulated.process import in_simulator
from tests.simulated.simulator import Simulator
from zenflow_compile.runtime.device.thread_lane import ThreadTicket
from zenflow_compile.runtime.host.workers import Job, bounds_of
from zenflow_compile.runtime.parameters.state_exchange import ExchangeWork


@in_simulator
def test_copy_waits_for_the_job_that_reads_its_target(simulator: Simulator) -> None:
    check_wait_for_reader(Case("windows"), simulator)


@in_simulator
def test_copy_waits_for_a_job_of_another_parameter(simulator: Simulator) -> None:
    check_wait_for_reader(Case("windows"), simulator, of_sharer=True)


def check_wait_for_reader(case: Case, simulator: Simulator, *, of_sharer: bool = False) -> None:
    """A copy into a gradient buffer waits for a job that reads it.

    Args:
        of_sharer: the job is one of another parameter, which has the same memory.
    """
    serve()
    loop = Loop(case, simulator.device)
    for step in range(6):
        loop.step(step)
    every = loop.optimizer.engine.offloaded.values()
    offloaded = next(each for each in every if not of_sharer or each.host.sharers[each.plan.gradient_buffers.index(6)])
    host = offloaded.host
    gate = ThreadTicket()
    state = [torch.zeros(1, 1)] * 3
    work = ExchangeWork(state, torch.zeros(1, dtype=torch.int32), state, bounds_of([slice(0, 1)]))
    job = Job(work, (gate,), (), host.pool, deadline=0, step=0, param="reader", flag=host.next_flag())
    offloaded.transport.workers.submit(job)
    index = host.plan.gradient_buffers.index(6)
    reader, place = host, index
    if of_sharer:
        sharer, place = host.sharers[index][0]
        found = sharer()
        assert found is not None
        reader = found
        reader.uploading[place] = None
    reader.readers[place] = job
    simulator.run_others()  # copies of earlier steps into the same memory
    before = host.gradients[index].clone()
    loop.loss(6).backward()
    simulator.run_others()
    assert torch.equal(host.gradients[index], before)
    gate.set()
    offloaded.transport.to_host.settle()
    assert not torch.equal(host.gradients[index], before)
    loop.close()


@in_simulator
def test_everything_is_given_back(simulator: Simulator) -> None:
    serve()
    left = []
    for options in ("windows", "windows", "reselect often", "int8", "streamed"):
        loop = Loop(Case(options), simulator.device)
        for step in range(4):
            loop.step(step)
        assert simulator.registered_bytes()
        loop.close()
        del loop
        torch._dynamo.reset()
        gc.collect()
        torch.sim.synchronize()  # type: ignore[attr-defined]
        assert not simulator.registered_bytes()
        left.append(torch.sim.memory_allocated())  # type: ignore[attr-defined]
    assert len(set(left)) == 1, "PyTorch keeps the last batch, whatever ran"
