"""Finds the matrices of a model that Muon is for: those between its embeddings and its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zenflow_compile.rules.muon import Muon

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

_HEADS = ("lm_head", "head", "output", "classifier", "score", "fc", "qa_outputs")


def muon_groups(
    model: Module, rule: Muon, chosen: Callable[[str, Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Param groups of a model: matrices by Muon, and all others by the rule of the optimizer.

    Args:
        rule: of the first group.
        chosen: says which parameters it has, by name; None: hidden matrices, which are those with two dimensions but
            for weights of embeddings, of what ``model.get_output_embeddings()`` returns, and of modules that are in no
            numbered block and called ``lm_head``, ``head``, ``output``, ``classifier``, ``score``, ``fc`` or
            ``qa_outputs``. Tables that are no ``nn.Embedding`` are not told apart.

    Raises:
        ValueError: no parameter is chosen.
    """
    apart = {id(each) for each in _outer_weights(model)}
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]

    def is_hidden(_: str, param: Tensor) -> bool:
        return param.dim() == 2 and id(param) not in apart

    picked = chosen or is_hidden
    first = [(name, param) for name, param in named if picked(name, param)]
    if not first:
        raise ValueError("no parameter of the model is chosen for Muon; pass another predicate, or another rule")
    others = [(name, param) for name, param in named if not picked(name, param)]
    return [{"params": first, "rule": rule}, *([{"params": others}] if others else [])]


def _outer_weights(model: Module) -> list[Tensor]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [head] if head is not None else []
    for name, module in model.named_modules():
        *path, last = name.split(".")
        in_block = any(each.isdigit() for each in path)  # hidden layers may be called so, too
        is_head = last in _HEADS and not in_block
        if is_head or type(module).__name__.endswith("Embedding") or hasattr(module, "num_embeddings"):
            outer.append(module)
    return [param for module in outer for param in module.parameters()]
