"""A GPU that is not there, under the real CUDA build of PyTorch: see ``csrc/device.h``.

It shows order, waits, copies and allocations. It shows no speed, no arithmetic of compiled kernels, and nothing of
NCCL.

``make fake-gpu`` makes an environment of its own with the pinned wheels, and builds this for it.
"""
