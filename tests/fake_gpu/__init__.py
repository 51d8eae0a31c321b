"""A GPU that is not there, under the real CUDA build of PyTorch: see ``csrc/device.h``.

``make fake-gpu`` makes an environment of its own with the pinned wheels, and builds this for it.
"""
