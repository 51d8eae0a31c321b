"""Host updates by PyTorch's fused AdamW, whose arithmetic is that of updates on the CPU as the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zenflow_compile.native.library import DONE
from zenflow_compile.runtime.host.host_kernel import WindowUpdate
from zenflow_compile.runtime.host.workers import Job, Workers
from zenflow_compile.runtime.parameters.host_state import UpdateWork
from zenflow_compile.runtime.update_rule import PaddedTail, StepCoefficients


@torch.no_grad()
def aten_update(update: WindowUpdate) -> None:
    """Apply rule P to state of any form; the gradients are not compressed."""
    form = update.form
    rows = form.rows(update.state, update.weights)
    state = [each.reshape(-1).clone() for each in rows.read(slice(0, update.out.numel() // form.length))]
    scaled = [
        gradient.float() * float(own.grad_scale)
        for gradient, own in zip(update.gradients, update.coefficients, strict=True)
    ]
    cut = PaddedTail.of((*state, *scaled))
    for parts in (cut.vectors, cut.padded):
        if parts:
            _apply(parts[:3], parts[3:], update.coefficients, step=update.step)
    cut.put_back(3)
    changed = [each.view(-1, form.length) for each in state]
    update.out.copy_(state[0])
    form.rows(update.state, update.out if form.split else None).write(changed, step=update.step)


def _apply(state: list[Tensor], grads: list[Tensor], coefficients: Sequence[StepCoefficients], *, step: int) -> None:
    """One fused step per gradient, with a rate of zero for all but the last: such a step moves only the moments."""
    options, last = [each.options for each in coefficients], coefficients[-1].options
    rate = math.fsum(each.lr for each in options)
    decay = math.prod(1.0 - each.lr * each.weight_decay for each in options)
    weight_decay = (1.0 - decay) / rate if rate else 0.0
    taken = 0
    for (beta1, beta2), group in itertools.groupby(options[:-1], key=lambda own: (own.beta1, own.beta2)):
        count = len(list(group))
        # eps = 1 keeps the quotient finite where v is still zero: rate 0 times it is then 0.
        _fused(state, grads[taken : taken + count], step, lr=0.0, betas=(beta1, beta2), weight_decay=0.0, eps=1.0)
        taken += count
    betas = last.beta1, last.beta2
    _fused(state, grads[-1:], step, lr=rate, betas=betas, weight_decay=weight_decay, eps=last.eps)


def _fused(
    state: list[Tensor], grads: list[Tensor], step: int, *, lr: float, betas: tuple[float, float],
    weight_decay: float, eps: float,
) -> None:  # fmt: skip
    count, (master, exp_avg, exp_avg_sq) = len(grads), state
    torch._fused_adamw_(
        [master] * count, grads, [exp_avg] * count, [exp_avg_sq] * count, [], [torch.tensor(float(step))] * count,
        amsgrad=False, maximize=False, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
    )  # fmt: skip


@contextmanager
def aten_updates() -> Iterator[None]:
    """Let the thread that submits updates make them, in this arithmetic."""
    submit = Workers.submit

    def at_once(workers: Workers, *jobs: Job) -> None:
        for job in jobs:
            if not isinstance(job.work, UpdateWork):
                submit(workers, job)
                continue
            inputs: list[Any] = [*job.inputs, *job.after]
            for each in inputs:
                each.wait()
            assert not job.behind
            work = job.work
            update = work.addresses.owner
            aten_update(replace(update, coefficients=work.coefficients, step=work.taken))
            job.memory.queued = job.memory.settled = 1
            job.memory.state = DONE
            if job.flag is not None:
                job.flag.raise_it()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "submit", at_once)
        yield
