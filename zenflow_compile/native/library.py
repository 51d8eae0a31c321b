"""The functions of the compiled library, and the structures that they take."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from zenflow_compile.native.build import BuildError, load_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Numbers of dtypes, as ``Dtype`` in update_rule.h."""


class Step(ctypes.Structure):
    """``Step`` of update_rule.h: the hyperparameters of the optimizer step that used a gradient."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("grad_scale", "beta1", "beta1_rest", "beta2", "beta2_rest"))


class UpdateWindow(ctypes.Structure):
    """``UpdateWindow`` of update_rule.h. Addresses keep no memory alive: the caller does."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "out")),
        ("gradients", ctypes.POINTER(ctypes.c_void_p)),
        ("steps", ctypes.POINTER(Step)),
        *((name, ctypes.c_int64) for name in ("count", "slices", "length")),
        *((name, ctypes.c_int32) for name in ("gradient_dtype", "out_dtype")),
        *((name, ctypes.c_float) for name in ("decay", "step_size", "bias_correction2_sqrt", "eps")),
    )


@cache
def library() -> ctypes.CDLL:
    """The compiled library. Its functions release the GIL.

    Raises:
        BuildError: see :func:`load_library`; or the library was made for other structures.
    """
    loaded = load_library()
    loaded.zenflow_update.argtypes = (ctypes.POINTER(UpdateWindow), ctypes.c_int64, ctypes.c_int64)
    loaded.zenflow_update.restype = None
    loaded.zenflow_window_bytes.argtypes = ()
    loaded.zenflow_window_bytes.restype = ctypes.c_int64
    if loaded.zenflow_window_bytes() != ctypes.sizeof(UpdateWindow):
        raise BuildError("the compiled library and zenflow_compile/native/library.py disagree on UpdateWindow")
    return loaded
