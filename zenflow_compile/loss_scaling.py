"""How ``torch.amp.GradScaler`` sees gradients that never reach ``.grad``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter


class Carrier(Parameter):
    """Stands for all offloaded gradients among the optimizer's parameters, from a backward until the step.

    The scaler checks and unscales ``param.grad`` of the optimizer's parameters, and refuses to step where it finds
    none. The carrier's ``.grad`` is f32[2]: the L2 norm of all offloaded gradients, not finite as soon as one of them
    is not, and 1.0, which becomes the factor that ``unscale_`` multiplied with. It is computed only if somebody asks.
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
            self._grad = torch.stack([norm, torch.ones_like(norm)])
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._grad = value

    @property
    def unscaled_by(self) -> float:
        """The factor that the gradients count as multiplied with; 1.0 if nobody unscaled them."""
        return 1.0 if self._grad is None else float(self._grad[1])
