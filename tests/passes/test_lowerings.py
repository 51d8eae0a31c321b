from __future__ import annotations

import torch

from zenflow_compile.runtime import ops
from zenflow_compile.torch_internals import torch_private_compiler as private


def test_every_mutating_op_gets_a_lowering() -> None:
    defined = [getattr(torch.ops.zenflow, schema[: schema.index("(")]).default for schema, _, _ in ops._NODES]
    assert set(ops.MUTATING) == {op for op in defined if op._schema.is_mutable}
    private.register_write_lowerings(ops.MUTATING)
    private.register_write_lowerings(ops.MUTATING)  # the second compilation does it again
    from torch._inductor.lowering import fallbacks, lowerings

    assert all(op in lowerings and op not in fallbacks for op in ops.MUTATING)
