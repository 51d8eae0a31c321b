"""Imports timm where torchvision has no compiled operators for the installed PyTorch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

_BOXES = "(Tensor dets, Tensor scores, float threshold) -> Tensor"


def import_timm() -> Any:
    """``timm``. Where ``scripts/setup_env.sh`` set a torchvision apart, only its Python parts are used.

    Importing it registers rules for operators that were not loaded: two of them are declared, without kernels.
    """
    apart = Path(sys.prefix) / "torchvision"
    if "torchvision" in sys.modules or not apart.is_dir():
        return importlib.import_module("timm")
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", _BOXES)
    sys.path.append(str(apart))
    try:
        return importlib.import_module("timm")
    finally:
        sys.path.remove(str(apart))  # processes that tests spawn get this path, but not the operators
