"""Changed coefficients of optimizer steps."""

from __future__ import annotations

from zenflow_compile.runtime.update_rule import StepCoefficients


def with_lr(coefficients: StepCoefficients, lr: float) -> StepCoefficients:
    return coefficients._replace(options=coefficients.options._replace(lr=lr))
