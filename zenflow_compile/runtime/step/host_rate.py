"""Measures how fast the host updates, in memory made for it."""

from __future__ import annotations

import math
import time

import torch

from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime.host.cores import last_level_cache_bytes
from zenflow_compile.runtime.host.host_kernel import HostKernel, WindowUpdate
from zenflow_compile.runtime.host.workers import Job, Workers, bounds_of
from zenflow_compile.runtime.parameters.host_state import TASK_ELEMENTS, UpdateWork, WindowAddresses, touched_bytes
from zenflow_compile.runtime.state_forms import StateForm
from zenflow_compile.runtime.update_rule import StepCoefficients

_CACHES = 2  # the measurement covers this many times the last-level cache


def host_rate(kernel: HostKernel, plan: ParamPlan, workers: Workers) -> float:
    """Measure the bytes per second at which all workers together update windows of the longest length.

    It takes some ten milliseconds, in memory made for it: tasks of the usual size, the same number for each worker,
    together larger than the last-level cache, as a model's state is. The first round touches the memory, the second one
    is timed.
    """
    coefficients = [StepCoefficients.known(lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1.0)] * plan.interval
    touched = touched_bytes(plan, len(coefficients))
    of_task = max(1, TASK_ELEMENTS // plan.length)  # slices
    rounds = max(1, math.ceil(_CACHES * last_level_cache_bytes() / (of_task * plan.length * touched * workers.count)))
    tasks = rounds * workers.count
    slices, elements = tasks * of_task, tasks * of_task * plan.length
    form = StateForm.of_deferred(plan)
    # Ones, because the system backs fresh zeros with a single page, which would be read from the cache.
    stored = zip(form.row_elements, form.dtypes, strict=True)
    state = [torch.ones(slices * row, dtype=dtype, device="cpu") for row, dtype in stored]
    out = torch.ones(elements, dtype=plan.dtype, device="cpu")
    shape = (slices, plan.gradient_buffers.shape[1]) if plan.compressed else (elements,)
    gradients = [torch.ones(shape, dtype=plan.gradient_buffers.dtype, device="cpu") for _ in coefficients]
    update = WindowUpdate(state, out, gradients, coefficients, len(coefficients), form, out if form.split else None)
    addresses = WindowAddresses(kernel.window(update), update)
    bounds = bounds_of([slice(number * elements // tasks, (number + 1) * elements // tasks) for number in range(tasks)])
    work = UpdateWork(addresses, coefficients, len(coefficients), touched, bounds)
    workers.start()
    seconds = 0.0
    for _ in range(2):
        job = Job(work, (), (), workers.handle, deadline=0, step=0, param="(measuring the host's rate)")
        begin = time.perf_counter()
        workers.submit(job)
        job.wait()
        seconds = time.perf_counter() - begin
    return elements * touched / seconds
