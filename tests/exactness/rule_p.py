"""The oracle: update windows, phases, selection, rule P and the mean update, implemented without asynchrony.

It shares only the plan with the runtime. The plan holds decisions made before training: which parameters are split,
along which dimension, into how many slices, and at which phase their windows flush. The oracle computes the number of
selection groups itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn

from zenflow_compile.planning.plan import ParamPlan

SCORE_DECAY = 0.9


@dataclass(frozen=True)
class Hyper:
    """Coefficients of one step."""

    lr: float
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass
class SplitParam:
    """One split parameter: fp32 state ``[slices, length]`` of all its slices, selected and deferred.

    Attributes:
        selected: bool[slices], the slices that are updated at every step.
        kept: for an adaptive selection, the share of selected slices that the previous flush would have kept.
        taken: number of gradients in the moments of selected slices, and after a flush in those of deferred ones.
        window: gradients in the update window, each with the coefficients of its step.
        updates: computed updates not applied yet: (first forward that sees it, slices, new values), oldest first.
    """

    param: nn.Parameter
    plan: ParamPlan
    master: Tensor = field(init=False)
    exp_avg: Tensor = field(init=False)
    exp_avg_sq: Tensor = field(init=False)
    selected: Tensor = field(init=False)
    score: Tensor = field(init=False)
    taken: int = 0
    selected_at: int | None = None
    window: list[tuple[Tensor, Hyper]] = field(default_factory=list)
    updates: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    selections: int = 0
    kept: float = 1.0

    def __post_init__(self) -> None:
        self.master = self.slices(self.param.detach()).float().clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.selected = torch.arange(self.plan.slices) < self.plan.k
        self.score = torch.zeros(self.plan.slices)

    def slices(self, tensor: Tensor) -> Tensor:
        """A view ``[slices, length]``."""
        matrix = tensor.view(tensor.shape[: self.plan.row_dims].numel(), -1)
        return matrix if self.plan.dim == 0 else matrix.t()

    def write(self, mask: Tensor, values: Tensor) -> None:
        """Write slices into the parameter."""
        self.slices(self.param.detach())[mask] = values

    def take(self, mask: Tensor, grad: Tensor, hyper: Hyper) -> None:
        """Add a gradient to the moments."""
        grad = grad[mask]
        self.exp_avg[mask] = hyper.beta1 * self.exp_avg[mask] + (1 - hyper.beta1) * grad
        self.exp_avg_sq[mask] = hyper.beta2 * self.exp_avg_sq[mask] + (1 - hyper.beta2) * grad**2

    def take_mean(self, mask: Tensor) -> None:
        """Add the mean of the window's gradients to the moments, weighted as all of them."""
        mean = torch.stack([grad[mask] for grad, _ in self.window]).mean(0)
        kept1 = math.prod(hyper.beta1 for _, hyper in self.window)
        kept2 = math.prod(hyper.beta2 for _, hyper in self.window)
        self.exp_avg[mask] = kept1 * self.exp_avg[mask] + (1 - kept1) * mean
        self.exp_avg_sq[mask] = kept2 * self.exp_avg_sq[mask] + (1 - kept2) * mean**2

    def move(self, mask: Tensor, hypers: Sequence[Hyper]) -> None:
        """Update the weights once: decays multiply, learning rates add up, moments are the newest."""
        last = hypers[-1]
        mean = self.exp_avg[mask] / (1 - last.beta1**self.taken)
        root = (self.exp_avg_sq[mask] / (1 - last.beta2**self.taken)).sqrt()
        decay = math.prod(1 - hyper.lr * hyper.weight_decay for hyper in hypers)
        rate = sum(hyper.lr for hyper in hypers)
        self.master[mask] = self.master[mask] * decay - rate * mean / (root + last.eps)

    def step(
        self,
        grad: Tensor | None,
        hyper: Hyper,
        at: int,
        *,
        warming_up: bool,
        flushed: bool,
        select_interval: int | None,
    ) -> None:
        """Take step ``at``, with or without a gradient. During warm-up, updates are applied without staleness."""
        if grad is not None:
            grad = self.slices(grad.contiguous()).float()
            self.taken += 1
            self.score = SCORE_DECAY * self.score + (1 - SCORE_DECAY) * grad.square().sum(1)
            self.take(self.selected, grad, hyper)
            self.move(self.selected, [hyper])
            self.write(self.selected, self.master[self.selected])
            self.window.append((grad, hyper))
        if flushed and self.window:
            deferred = ~self.selected
            if self.plan.summed:
                self.take_mean(deferred)
            else:
                for earlier, its_hyper in self.window:
                    self.take(deferred, earlier, its_hyper)
            self.move(deferred, [its_hyper for _, its_hyper in self.window])
            self.window = []
            staleness = 0 if warming_up else self.plan.staleness
            self.updates.append((at + 1 + staleness, deferred, self.master[deferred]))
            if self.plan.deferred and self.plan.k:
                if self.selected_at is None:
                    self.reselect(at, self.best())
                elif select_interval is None:
                    self.follow_drift(at)
                elif at - self.selected_at >= select_interval:
                    self.reselect(at, self.best())

    @property
    def groups(self) -> list[list[int]]:
        """Slices of each group: 48 groups, or fewer, so that each can select four slices and defer four."""
        fewer = min(self.plan.k, self.plan.deferred) // 4
        count = max(number for number in (1, 2, 4, 8, 16, 24, 48) if number <= max(1, fewer))
        return [list(range(group, self.plan.slices, count)) for group in range(count)]

    def flush(self, at: int) -> None:
        """Apply the gradients in the update window before step ``at``, and every update. The selection stays."""
        if self.window:
            deferred = ~self.selected
            if self.plan.summed:
                self.take_mean(deferred)
            else:
                for grad, its_hyper in self.window:
                    self.take(deferred, grad, its_hyper)
            self.move(deferred, [its_hyper for _, its_hyper in self.window])
            self.window = []
            self.updates.append((at, deferred, self.master[deferred]))
        self.apply_updates(at + 1 + self.plan.staleness)

    def best(self) -> Tensor:
        """bool[slices]: the best slices of each group, as many as the group has among the first k slices."""
        best = torch.zeros_like(self.selected)
        for group in self.groups:
            ranked = sorted(group, key=lambda slice_index: -self.score[slice_index].item())
            best[ranked[: sum(slice_index < self.plan.k for slice_index in group)]] = True
        return best

    def follow_drift(self, at: int) -> None:
        """Re-select only if, at the flush before, under 80% of the slices would have stayed, and within a budget."""
        assert self.selected_at is not None
        waited, least = at - self.selected_at, max(16, self.plan.interval)
        drifted, self.kept = self.kept < 0.8, 1.0
        slice_bytes = 2 * 3 * 4 * self.plan.length  # fp32 master and moments, there and back
        swaps = int(0.01 * waited * self.param.nbytes / slice_bytes)
        if waited >= least and drifted and swaps:
            self.reselect(at, self.after_swaps(self.swaps_of_groups(swaps, at)))
        elif waited + self.plan.interval >= least:
            self.kept = (self.after_swaps([self.plan.k] * len(self.groups)) & self.selected).sum().item() / self.plan.k

    def swaps_of_groups(self, swaps: int, at: int) -> list[int]:
        """Swaps of each group: equal shares. The remainder goes to consecutive groups; the first differs by step."""
        count = len(self.groups)
        shares = [swaps // count] * count
        golden = Fraction(0x9E3779B1, 2**32)
        first = math.floor(at // 16 * golden % 1 * count)
        for extra in range(swaps % count):
            shares[(first + extra) % count] += 1
        return shares

    def after_swaps(self, at_most: Sequence[int]) -> Tensor:
        """bool[slices]: in each group the best deferred slices replace the worst selected ones if 25% better."""
        wanted = self.selected.clone()
        for group, swaps in zip(self.groups, at_most, strict=False):
            leaving = sorted(
                (slice_index for slice_index in group if self.selected[slice_index]),
                key=lambda slice_index: self.score[slice_index].item(),
            )
            entering = sorted(
                (slice_index for slice_index in group if not self.selected[slice_index]),
                key=lambda slice_index: -self.score[slice_index].item(),
            )
            for out, into in list(zip(leaving, entering, strict=False))[:swaps]:
                if self.score[into] > 1.25 * self.score[out]:
                    wanted[out], wanted[into] = False, True
        return wanted

    def reselect(self, at: int, wanted: Tensor) -> None:
        """Select ``wanted`` from the next gradient on. Slices that move must be current: updates are applied first."""
        self.selected_at = at
        self.selections += 1
        self.apply_updates(at + 1 + self.plan.staleness)
        self.selected = wanted

    def apply_updates(self, now: int) -> None:
        """Apply the updates that a forward after ``now`` attempted steps sees."""
        while self.updates and self.updates[0][0] <= now:
            _, mask, values = self.updates.pop(0)
            self.write(mask, values)


class RuleP:
    """An optimizer for all parameters of a model; those that the plan does not split get ``torch.optim.AdamW``.

    Args:
        plans: of the parameters, in their order.
        full_warm_up_rounds: first steps, at which every window is flushed.
        select_interval: steps between re-selections; None lets them follow the drift of the scores.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        plans: Sequence[ParamPlan],
        *,
        full_warm_up_rounds: int = 0,
        select_interval: int | None = None,
    ) -> None:
        pairs = list(zip(params, plans, strict=True))
        self.split = {plan.name: SplitParam(param, plan) for param, plan in pairs if plan.offloaded}
        self.resident = torch.optim.AdamW([param for param, plan in pairs if not plan.offloaded])
        self.full_warm_up_rounds = full_warm_up_rounds
        self.select_interval = select_interval
        self.at = 0

    @torch.no_grad()
    def step(self, hyper: Hyper) -> None:
        """Apply ``.grad`` of all parameters, and discard it."""
        for each in self.split.values():
            warming_up = self.at < self.full_warm_up_rounds
            each.step(
                each.param.grad,
                hyper,
                self.at,
                warming_up=warming_up,
                flushed=warming_up or self.at % each.plan.interval == each.plan.phase,
                select_interval=self.select_interval,
            )
            each.param.grad = None
        group = self.resident.param_groups[0]
        group.update(lr=hyper.lr, weight_decay=hyper.weight_decay, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps)
        self.resident.step()
        self.resident.zero_grad()
        self.at += 1
        for each in self.split.values():
            each.apply_updates(self.at)

    @torch.no_grad()
    def flush(self) -> None:
        """Apply every gradient in an update window."""
        for each in self.split.values():
            each.flush(self.at)
