"""How ``torch.amp.GradScaler`` sees gradients that never reach ``.grad``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

WITNESS = 2.0**-64


class Carrier(Parameter):
    """Stands for all offloaded gradients among the optimizer's parameters, from a backward until the step.

    The scaler checks and unscales ``param.grad`` of the optimizer's parameters, and refuses to step where it finds
    none. The carrier's ``.grad`` is f32[2]: the L2 norm of all offloaded gradients, not finite as soon as one of them
    is not, and a witness of whatever factor it is multiplied with, by ``unscale_`` or by
    ``torch.nn.utils.clip_grad_norm_`` over the optimizer's groups. The witness is too small to count in that norm.
    Both are computed only if somebody asks.
    """

    _norm: Callable[[], Tensor]
    _grad: Tensor | None

    @staticmethod
    def standing_for(norm: Callable[[], Tensor]) -> Carrier:
        """A carrier whose gradient's first element is what ``norm()`` returns, a 0-d tensor."""
        carrier = Carrier(torch.zeros(2), requires_grad=True)
        carrier._norm = norm
        carrier._grad = None
        return carrier

    @property
    def grad(self) -> Tensor | None:
        if self._grad is None:
            norm = self._norm()
            self._grad = torch.stack([norm, torch.full_like(norm, WITNESS)])
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad = value

    @property
    def unscaled_by(self) -> float:
        """The factor that the gradients count as multiplied with; 1.0 if nobody unscaled or clipped them."""
        return 1.0 if self._grad is None else float(self._grad[1]) / WITNESS
