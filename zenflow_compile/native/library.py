"""The functions of the compiled library, and the structures that they take. Addresses keep no memory alive."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch

from zenflow_compile.native.build import BuildError, load_library, load_rule
from zenflow_compile.rules.cpp import printed
from zenflow_compile.rules.rule import MOST_ARRAYS, MOST_NUMBERS, Rule

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Numbers of dtypes, as ``Dtype`` in vectors.h."""

PENDING, DONE, FAILED = 0, 1, 2
"""``State`` in pool.h."""
COUNTER, STATE = 0, 1
"""``GateKind`` in pool.h."""
UPDATE, EXCHANGE, READ, WRITE = 0, 1, 2, 3
"""``Kind`` in pool.h."""

_Field = tuple[str, type]


def _fields(kind: type, *names: str) -> tuple[_Field, ...]:
    return tuple((name, kind) for name in names)


class Step(ctypes.Structure):
    """``Step`` of windows.h: the numbers of one gradient."""

    _fields_ = (("grad_scale", ctypes.c_float), ("numbers", ctypes.c_float * MOST_NUMBERS))


class StoredState(ctypes.Structure):
    """``StoredState`` of windows.h."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("arrays", ctypes.c_void_p * MOST_ARRAYS),
        ("weights", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        *_fields(ctypes.c_int32, "split", "moments", "count", "rounded"),
        ("nonnegative", ctypes.c_uint32),
    )


class UpdateWindow(ctypes.Structure):
    """``UpdateWindow`` of windows.h."""

    _fields_ = (
        ("state", StoredState),
        ("out", ctypes.c_void_p),
        ("gradients", ctypes.POINTER(ctypes.c_void_p)),
        ("steps", ctypes.POINTER(Step)),
        ("update", ctypes.c_void_p),
        *_fields(ctypes.c_int64, "count", "slices"),
        ("random", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "gradient_dtype", "out_dtype"),
        ("numbers", ctypes.c_float * MOST_NUMBERS),
    )


class Gate(ctypes.Structure):
    """``Gate`` of pool.h: an input of a job."""

    _fields_ = (("word", ctypes.c_void_p), ("value", ctypes.c_uint32), ("kind", ctypes.c_int32))


class Record(ctypes.Structure):
    """``Record`` of pool.h: when and where a task ran."""

    _fields_ = (*_fields(ctypes.c_int64, "begin_ns", "end_ns", "rows"), ("worker", ctypes.c_int32))


class LateScale(ctypes.Structure):
    """``LateScale`` of pool.h: a late ``Number``."""

    _fields_ = (
        ("cells", ctypes.POINTER(ctypes.c_void_p)),
        *_fields(ctypes.c_int64, "count", "gradient"),
        ("factor", ctypes.c_double),
    )


class Exchange(ctypes.Structure):
    """``Exchange`` of pool.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("state", StoredState),
        ("block", ctypes.c_void_p * (1 + MOST_ARRAYS)),
        ("weights", ctypes.c_void_p),
        ("weights_dtype", ctypes.c_int32),
    )


class FileChunk(ctypes.Structure):
    """``FileChunk`` of file_transfers.h."""

    _fields_ = (
        *_fields(ctypes.c_int32, "file", "direct"),
        *_fields(ctypes.c_int64, "offset", "size"),
        ("checksum", ctypes.c_uint32),
    )


class Transfer(ctypes.Structure):
    """``Transfer`` of file_transfers.h."""

    _fields_ = (("chunk", ctypes.POINTER(FileChunk)), ("memory", ctypes.c_void_p), ("checksum", ctypes.c_uint32))


class HostJob(ctypes.Structure):
    """``Job`` of pool.h."""

    _fields_ = (
        *_fields(ctypes.c_uint32, "state", "settled", "queued"),
        ("kind", ctypes.c_int32),
        *_fields(ctypes.c_int64, "failed_gate", "error", "step", "deadline"),
        ("gates", ctypes.POINTER(Gate)),
        ("gate_count", ctypes.c_int64),
        ("flag", ctypes.c_void_p),
        ("flag_value", ctypes.c_uint32),
        ("bounds", ctypes.POINTER(ctypes.c_int64)),
        ("tasks", ctypes.c_int64),
        ("records", ctypes.POINTER(Record)),
        ("window", ctypes.POINTER(UpdateWindow)),
        ("steps", ctypes.POINTER(Step)),
        ("late", ctypes.POINTER(LateScale)),
        ("late_count", ctypes.c_int64),
        ("exchange", ctypes.POINTER(Exchange)),
        ("transfer", ctypes.POINTER(Transfer)),
        *_fields(ctypes.c_int64, "untaken", "unfinished"),
    )


_STRUCTURES = (Step, StoredState, UpdateWindow, Gate, Record, LateScale, Exchange, FileChunk, Transfer, HostJob)

OTHER_CHECKSUM = -1
"""``kOtherChecksum`` in file_transfers.h."""


@cache
def library() -> ctypes.CDLL:
    """The compiled library. Its functions release the GIL.

    Raises:
        BuildError: see :func:`load_library`; or the library was made for other structures.
    """
    loaded = load_library()
    _declare(loaded)
    for number, structure in enumerate(_STRUCTURES):
        if loaded.zenflow_bytes(number) != ctypes.sizeof(structure):
            raise BuildError(f"the compiled library and native/library.py disagree on {structure.__name__}")
    return loaded


@lru_cache(maxsize=32)
def rule_address(rule: Rule) -> int:
    """The address of ``zenflow_update`` of a rule, which jobs call.

    Raises:
        BuildError: see :func:`load_library`.
        ValueError: the rule cannot be printed, see ``tracing.trace``.
    """
    return ctypes.cast(load_rule(printed(rule)).zenflow_update, ctypes.c_void_p).value or 0


@cache
def library_with_gil() -> ctypes.PyDLL:
    """The library for calls of some microseconds: they keep the GIL, so that no interrupt comes in the middle."""
    loaded = library()
    same = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    _declare(same)
    return same


def _declare(loaded: ctypes.CDLL) -> None:
    pool, job = ctypes.c_void_p, ctypes.POINTER(HostJob)
    functions: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "zenflow_bytes": (ctypes.c_int64, (ctypes.c_int,)),
        "zenflow_crc32": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_int64)),
        "zenflow_move_chunk": (ctypes.c_int64, (ctypes.POINTER(Transfer), ctypes.c_int)),
        "zenflow_open": (
            ctypes.c_int,
            (ctypes.POINTER(pool), ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_int64, ctypes.c_char_p),
        ),
        "zenflow_submit": (ctypes.c_int, (pool, ctypes.POINTER(job), ctypes.c_int64)),
        "zenflow_abort": (None, (pool, job)),
        "zenflow_wait": (ctypes.c_int, (pool, job, ctypes.c_int, ctypes.c_int64)),
        "zenflow_acquire": (None, ()),
        "zenflow_write_behind": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)),
        "zenflow_close": (ctypes.c_int, (pool, ctypes.c_int64)),
        "zenflow_end": (None, (pool,)),
    }  # fmt: skip
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
