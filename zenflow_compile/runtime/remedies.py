"""What a user can turn where memory is short: each policy has knobs of its own."""

from __future__ import annotations

from typing import NoReturn

from zenflow_compile.options import Options

_NO_HOST_MEMORY = 'policy="resident", which needs no host memory'
_IN_FILES = 'policy="zero_infinity" with nvme_path, which keeps state in files'


def less_host_memory(options: Options) -> str:
    """Settings that need less host memory than ``options``, as the end of a sentence."""
    if options.policy == "zenflow":
        windows = "max_update_interval" if options.update_interval == "auto" else "update_interval"
        fewer = f"a larger topk_ratio, a smaller {windows} or a larger device_share, which move state to the device or "
        files = _smaller_window(options) or ['offload_device="nvme" with nvme_path, which keeps state in files']
        knobs = [fewer + "store fewer gradients", *files]
    elif options.policy == "zero_infinity":
        knobs = _smaller_window(options)
    elif options.policy == "zero_offload":
        knobs = ['policy="twinflow" with a ratio below 1, which keeps the others on the device', _IN_FILES]
    else:
        knobs = ["a smaller ratio, which keeps more state on the device", _IN_FILES]
    return ", or ".join([*knobs, _NO_HOST_MEMORY])


def smaller_uploads(options: Options) -> str:
    """Settings under which less is uploaded at once, as a part of a sentence with a comma behind it; or nothing."""
    return "raise topk_ratio, " if options.policy == "zenflow" else ""


def refuse_threads(error: RuntimeError) -> NoReturn:
    """
    Raises:
        RuntimeError: always: the system starts no further thread.
    """
    raise RuntimeError(
        f"no thread for host updates and copies could be started ({error}): raise the limit on processes (ulimit -u) "
        'or that of the control group (pids.max), run fewer DataLoader workers, or use policy="resident"'
    ) from error


def _smaller_window(options: Options) -> list[str]:
    if not options.in_files:
        return []
    return ["a smaller host_window_bytes, down to the state of the largest parameter"]
