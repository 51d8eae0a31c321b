"""What every Python process of the fake GPU's environment does first, children of tests, too."""

import ctypes
import os
import sys

if os.environ.get("FAKE_GPU_TRITON") == "off":
    sys.modules["triton"] = None  # as if it were not installed: kernels of aten take its place, which compute
if os.environ.get("FAKE_GPU_OPERATORS") == "1":
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        ctypes.CDLL("libfakegpuoperators.so").fake_gpu_install_operators()
