"""AdamW for the parameters that live on the device whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow_compile import torch_private
from zenflow_compile.runtime.adam import SlotCoefficients


@dataclass(slots=True)
class ResidentState:
    """Moments of one parameter, and an fp32 master where the weights are not fp32 themselves.

    Attributes:
        step: f32[], gradients taken, on the parameter's device as the fused kernel wants it.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None

    @classmethod
    def zeros_like(cls, param: Tensor) -> ResidentState:
        dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
        return cls(
            exp_avg=torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
            exp_avg_sq=torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
            step=torch.zeros((), dtype=torch.float32, device=param.device),
            master=None if param.dtype == dtype else param.detach().to(dtype, copy=True),
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the state."""
        return [self.exp_avg, self.exp_avg_sq, self.step, *([] if self.master is None else [self.master])]


class ResidentAdam:
    """Fused multi-tensor AdamW over parameters and their gradients; state appears with a parameter's first gradient."""

    def __init__(self) -> None:
        self.states: dict[Parameter, ResidentState] = {}
        self._versions: dict[Parameter, int] = {}

    @property
    def nbytes(self) -> int:
        """Device memory of the state."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.tensors())

    def update(
        self, params: Sequence[Parameter], grads: Sequence[Tensor], slot: SlotCoefficients, *, eps: float
    ) -> None:
        """One AdamW step for parameters that share coefficients. ``grads`` are not written.

        For fp32 weights this is ``torch.optim.AdamW(fused=True)`` bit for bit (with a grad_scale of 1).
        """
        for dtype in dict.fromkeys(param.dtype for param in params):
            members = [(p, g) for p, g in zip(params, grads, strict=True) if p.dtype == dtype]
            self._update([p for p, _ in members], [g for _, g in members], slot, eps)

    @torch.no_grad()
    def _update(self, params: list[Parameter], grads: list[Tensor], slot: SlotCoefficients, eps: float) -> None:
        states = [self._state(param) for param in params]
        weights = [param.detach() if state.master is None else state.master for param, state in zip(params, states, strict=True)]
        grads = [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
        if slot.grad_scale != 1.0:
            grads = list(torch._foreach_mul(grads, slot.grad_scale))
        steps = [state.step for state in states]
        torch._foreach_add_(steps, 1.0)
        torch_private.fused_adamw_multi_(
            weights,
            grads,
            [state.exp_avg for state in states],
            [state.exp_avg_sq for state in states],
            steps,
            lr=slot.lr,
            beta1=slot.beta1,
            beta2=slot.beta2,
            weight_decay=slot.weight_decay,
            eps=eps,
        )
        for param, state in zip(params, states, strict=True):
            if state.master is not None:
                param.detach().copy_(state.master)
            torch.autograd.graph.increment_version(param)
            self._versions[param] = param._version

    def _state(self, param: Parameter) -> ResidentState:
        state = self.states.get(param)
        if state is None:
            state = self.states[param] = ResidentState.zeros_like(param)
        elif state.master is not None and self._versions.get(param) != param._version:
            # Somebody else wrote the weights: they count, except where they are just what the master casts to.
            same = state.master.to(param.dtype) == param.detach()
            state.master.copy_(torch.where(same, state.master, param.detach().to(state.master.dtype)))
        return state

    def load(self, param: Parameter, state: ResidentState) -> None:
        """Put back a checkpoint's state; weights are compared with the master at the next update."""
        self.states[param] = state
        self._versions.pop(param, None)
