"""A word of memory that another process writes later: an input of native jobs that no thread here has to raise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading

from zenflow_compile.native.library import COUNTER
from zenflow_compile.runtime.device.copy_lanes import Gate


class LateWord:
    """A ticket whose gate opens after ``seconds``, also while a thread of this process keeps the GIL."""

    error = None

    def __init__(self, seconds: float) -> None:
        self._word = ctypes.c_uint32()
        self._read, write = os.pipe()
        self._process = subprocess.Popen(["sh", "-c", f"sleep {seconds}; printf '\\1\\0\\0\\0'"], stdout=write)
        os.close(write)
        # One call without the GIL: the kernel writes the word.
        read = ctypes.CDLL(None).read
        arguments = self._read, ctypes.c_void_p(ctypes.addressof(self._word)), ctypes.c_size_t(4)
        self._thread = threading.Thread(target=read, args=arguments, daemon=True)
        self._thread.start()

    def gate(self) -> Gate:
        return Gate(ctypes.addressof(self._word), 1, COUNTER, self._word)

    def done(self) -> bool:
        return self._word.value == 1

    def wait(self) -> None:
        self._thread.join()
        self._process.wait()

    wait_on_device = settle = wait
