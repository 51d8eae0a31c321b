"""What PyTorch's Python code asks of a device: the module ``torch.sim`` and Dynamo's interface."""

from __future__ import annotations

import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from tests.simulated.library import library
from tests.simulated.streams import Event, Stream, current_stream, default_stream, set_stream

NAME = "sim"


class DeviceProperties(NamedTuple):
    """What ``torch.cuda.get_device_properties`` returns elsewhere, as far as the compiler reads it."""

    name: str
    type: str
    index: int
    total_memory: int
    multi_processor_count: int


def current_device() -> int:
    """Index of the only device."""
    return 0


def set_device(device: Any) -> None:
    """Does nothing: there is one device."""


def exchange_device(device: int) -> int:
    """Index of the device that was current."""
    return 0


def device_count() -> int:
    """One."""
    return 1


def is_available() -> bool:
    """Whether the library could be loaded: it is."""
    return True


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Sizes of the device."""
    return DeviceProperties("simulated", NAME, 0, library().ask("capacity"), 1)


def device(device: Any) -> AbstractContextManager[None]:
    """A context that makes the only device the current one."""
    return nullcontext()


def stream(stream: Stream) -> AbstractContextManager[object]:
    """A context in which ``stream`` is the calling thread's current one."""
    return stream


def get_raw_stream(index: int) -> int:
    """Handle of the current stream."""
    return current_stream().handle


def set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    """Make the stream with this handle the current one."""
    set_stream(Stream(handle=stream_id))


def synchronize(device: Any = None) -> None:
    """Block the calling thread until all queued work is done."""
    library().call("synchronize_device")


def manual_seed(seed: int) -> None:
    """Seed the device's generator."""
    library().ask("seed", seed & (2**64 - 1))


def initial_seed() -> int:
    """The last seed."""
    return int(library().ask("initial_seed"))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of the device's generator: bytes in host memory."""
    state = torch.empty(library().ask("rng_state_bytes"), dtype=torch.uint8, device="cpu")
    library().ask("get_rng_state", state.data_ptr())
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Continue from a state that ``get_rng_state`` returned."""
    library().call("set_rng_state", state.contiguous().data_ptr())


def memory_allocated(device: Any = None) -> int:
    """Bytes of all tensors."""
    return int(library().ask("allocated"))


def max_memory_allocated(device: Any = None) -> int:
    """The largest number of bytes that tensors had at a time."""
    return int(library().ask("peak"))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start ``max_memory_allocated`` anew."""
    library().ask("reset_peak")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    total = int(library().ask("capacity"))
    return total - memory_allocated(), total


def make_module() -> types.ModuleType:
    """The module that PyTorch finds as ``torch.sim``."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    for function in (
        current_device,
        set_device,
        device_count,
        is_available,
        get_device_properties,
        device,
        stream,
        current_stream,
        default_stream,
        set_stream,
        synchronize,
        manual_seed,
        initial_seed,
        get_rng_state,
        set_rng_state,
        memory_allocated,
        max_memory_allocated,
        reset_peak_memory_stats,
        mem_get_info,
        Stream,
        Event,
    ):
        setattr(module, function.__name__, function)
    module.manual_seed_all = manual_seed
    module.memory_reserved = memory_allocated  # the allocator keeps nothing
    module.max_memory_reserved = max_memory_allocated
    module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.is_initialized = is_available
    module._initialized = True  # torch.utils.checkpoint asks before it saves the generator's state
    module.is_bf16_supported = lambda including_emulation=True: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


class SimulatedInterface(DeviceInterface):
    """What Dynamo and Inductor ask."""

    Stream = torch.Stream  # type: ignore[assignment]
    Event = torch.Event  # type: ignore[assignment]

    class device:  # noqa: N801 - the interface's name
        """A context that makes the only device the current one."""

        def __init__(self, device: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    class Worker:
        """The same questions in a process that compiles."""

        set_device = staticmethod(set_device)
        current_device = staticmethod(current_device)
        get_device_properties = staticmethod(get_device_properties)

    current_device = staticmethod(current_device)
    set_device = staticmethod(set_device)
    exchange_device = staticmethod(exchange_device)
    maybe_exchange_device = staticmethod(exchange_device)
    device_count = staticmethod(device_count)
    is_available = staticmethod(is_available)
    stream = staticmethod(stream)
    current_stream = staticmethod(current_stream)
    set_stream = staticmethod(set_stream)
    _set_stream_by_id = staticmethod(set_stream_by_id)
    get_raw_stream = staticmethod(get_raw_stream)
    synchronize = staticmethod(synchronize)
    get_device_properties = staticmethod(get_device_properties)
    memory_allocated = staticmethod(memory_allocated)

    @staticmethod
    def get_compute_capability(device: Any = None) -> int:
        """A number that no kernel depends on."""
        return 0

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        """As on the CPU, whose kernels run."""
        return True


def register() -> None:
    """Give the device its name, its module and Dynamo's interface. Cannot be undone in this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_interface_for_device(NAME, SimulatedInterface)
    register_interface_for_device(f"{NAME}:0", SimulatedInterface)
