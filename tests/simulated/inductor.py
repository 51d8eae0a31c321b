"""Inductor's C++ kernels on the simulated device.

Inductor generates the code that it generates for the CPU, and a kernel call passes raw pointers to the launch queue. As
on CUDA, a launch keeps nothing alive, and may hold the GIL while it blocks.

Inductor chooses some code by the name of the device: results may differ from those of the CPU in the last bits. Compare
with the simulated device in order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tests.simulated.device_module import NAME
from tests.simulated.library import library, library_with_gil

# The private names below were seen in these versions.
VERSIONS = ("2.13",)

OPTIONS: dict[str, Any] = {
    "cuda_backend": "cpp",  # it names the language for every device that Inductor does not know
    "compile_threads": 1,
    "loop_ordering_after_fusion": False,  # its heuristics ask for triton
    "fx_graph_cache": False,
}


def missing() -> str | None:
    """Why Inductor cannot target the device with this PyTorch; None if it can."""
    version = ".".join(torch.__version__.split(".")[:2])
    return None if version in VERSIONS else f"Inductor's private names were not checked in torch {version}"


def compile_with_inductor(model: nn.Module) -> Callable[..., Any]:
    """``torch.compile`` with Inductor, whose kernels run on the simulated device."""
    register_backend()
    compiled: Callable[..., Any] = torch.compile(model, options=OPTIONS)
    return compiled


@contextmanager
def launches_hold_gil() -> Iterator[None]:
    """Inside the block, launches of Inductor's kernels hold the GIL, as those of its static launcher for CUDA do."""
    Kernel.holds_gil = True
    try:
        yield
    finally:
        Kernel.holds_gil = False


class Kernel:
    """A generated kernel. Generated code makes it and calls it with tensors and sizes.

    Args:
        types: of its arguments in C++.
        source: defines a function ``kernel``.
    """

    # Of all kernels in this process.
    launched = 0
    holds_gil = False

    def __init__(self, types: list[str], source: str) -> None:
        from torch._inductor.codecache import CppCodeCache

        if any("*" not in each and "int" not in each and "long" not in each for each in types):
            raise NotImplementedError(f"a kernel with arguments {types}; only pointers and integers can be passed")
        self._function = CppCodeCache.load(source).kernel  # keeps its library loaded
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value

    def __call__(self, *arguments: Tensor | int) -> None:
        Kernel.launched += 1
        values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        for each in arguments:
            if isinstance(each, Tensor) and each.device.type != NAME:
                raise RuntimeError(f"a kernel of {NAME} was given a tensor of {each.device}")
        launcher = library_with_gil() if Kernel.holds_gil else library()
        launcher.call("launch_kernel", self._address, (ctypes.c_int64 * len(values))(*values), len(values))


@cache
def register_backend() -> None:
    from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import BaseSchedulerNode

    class Wrapper(PythonWrapperCodegen):
        """Generates the Python code around the kernels."""

        @staticmethod
        def create(is_subgraph: bool, *others: Any, **named: Any) -> PythonWrapperCodegen:
            if is_subgraph:
                raise NotImplementedError("subgraphs on the simulated device")
            return Wrapper()

        def write_header(self) -> None:
            super().write_header()
            self.header.writeline(f"from {__name__} import Kernel as SimulatedKernel")

        def define_kernel(self, kernel_name: str, kernel_body: str, *others: Any, **named: Any) -> None:
            body = kernel_body.replace("async_compile.cpp_pybinding(", "SimulatedKernel(", 1)
            super().define_kernel(kernel_name, body, *others, **named)

        def _generate_kernel_call_helper(
            self, kernel_name: str, call_args: list[str], *, device: Any = None, triton: bool = True, **named: Any
        ) -> None:
            if triton:
                raise NotImplementedError("Triton kernels on the simulated device")
            self.writeline(self.wrap_kernel_call(kernel_name, call_args))

    register_backend_for_device(NAME, CppScheduling, Wrapper)
    register_device_op_overrides(NAME, CpuDeviceOpOverrides())
    is_cpu = BaseSchedulerNode.is_cpu

    def is_cpu_or_simulated(node: Any) -> bool:
        # The scheduler asks whether C++ is generated, by asking for the CPU.
        device = node.get_device()
        return bool(is_cpu(node)) or (device is not None and device.type == NAME)

    BaseSchedulerNode.is_cpu = is_cpu_or_simulated
