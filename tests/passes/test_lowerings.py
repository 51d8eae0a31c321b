from __future__ import annotations

from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def test_every_mutating_op_gets_a_lowering() -> None:
    assert set(ops.MUTATING) == set(ops.OPS) - {ops.BEGIN_BACKWARD, ops.BEGIN_WEIGHTS}
    private.register_write_lowerings(ops.MUTATING)
    private.register_write_lowerings(ops.MUTATING)  # the second compilation does it again
    from torch._inductor.lowering import fallbacks, lowerings

    assert all(op in lowerings and op not in fallbacks for op in ops.MUTATING)
