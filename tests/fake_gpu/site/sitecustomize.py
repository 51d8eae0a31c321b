"""What every Python process of the fake GPU's environment does first, children of tests, too."""

import ctypes
import os
import sys

without = os.environ.get("FAKE_GPU_WITHOUT", "").split(",")
if os.environ.get("FAKE_GPU_TRITON") == "off":
    without.append("triton")  # kernels of aten take its place, which compute
for each in filter(None, without):
    sys.modules[each] = None  # as if it were not installed
if os.environ.get("FAKE_GPU_OPERATORS") == "1":
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        ctypes.CDLL("libfakegpuoperators.so").fake_gpu_install_operators()
        # Fused attention and cuDNN have kernels for CUDA alone, which compute nothing here.
        torch.backends.cudnn.enabled = False
        for each in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{each}_sdp")(False)
