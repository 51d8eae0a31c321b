"""The bytes that a step of a plan moves: input of the equations and of the roofline."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow_compile.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of all devices together. Values without ``per`` in their name are per step, averaged over update windows.

    Attributes:
        host: read and written in host memory by host updates, see ``ParamPlan.update_bytes``.
        to_host, to_device: gradients down and weights up.
        host_per_window, host_per_gradient: the parts of ``host``: with update windows of S steps it is
            ``host_per_window / S + host_per_gradient``. The gradients of every step are ``host_per_gradient``.
        gradients_per_window: gradients that go down once per update window, as their mean.
        upload_per_window: weights that a flushed window sends up. Those of offloaded weights are not sent: the next
            load reads them.
        forward_loads, backward_loads: offloaded weights that forwards and backwards load. Not in ``to_device``, like
            ``rewritten``.
        rewritten: offloaded weights that ``step()`` loads for an update on the device, and as much written back.
        state: optimizer state that is streamed to the device, and as much back. Not in ``to_host`` and ``to_device``.
        files, files_per_window: optimizer state that is read from files, and as much written. What stays in host memory
            between update windows is not counted.
        blocking: the step waits for its host updates by design.
    """

    host: float = 0.0
    to_host: float = 0.0
    to_device: float = 0.0
    host_per_window: int = 0
    host_per_gradient: int = 0
    gradients_per_window: int = 0
    upload_per_window: int = 0
    forward_loads: int = 0
    backward_loads: int = 0
    rewritten: int = 0
    state: int = 0
    files: float = 0.0
    files_per_window: int = 0
    blocking: bool = False

    @property
    def loads(self) -> int:
        """Bytes of offloaded weights that cross to the device per step."""
        return self.forward_loads + self.backward_loads + self.rewritten

    @property
    def disk(self) -> float:
        """Bytes read from files and written to them per step."""
        return 2 * self.files


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Measured rates in bytes per second.

    Attributes:
        host: of host memory, bytes read and bytes written, with as many threads as there are workers.
        to_host, to_device: of the link between device and host.
        disk: of the disk, with equal bytes read and written; None where it was not measured.
    """

    host: float
    to_host: float
    to_device: float
    disk: float | None = None


def traffic_of(plan: Plan) -> Traffic | None:
    """The traffic of ``plan`` after the first update window; None if all weights and state stay on the device."""
    offloaded = [param for param in plan.params if param.offloaded and param.deferred]
    state = sum(param.whole_state_bytes for param in plan.params if param.streamed)
    weights = plan.weights
    forward = plan.micro_batches * sum(plan.load_bytes(param) for param in plan.params)
    reloaded = [param for param in plan.params if weights is not None and param.index in weights.reloaded]
    backward = forward + plan.micro_batches * sum(plan.load_bytes(param) for param in reloaded)
    if not offloaded and not state and not forward:
        return None
    host = to_host = to_device = 0.0
    per_window = per_step = gradients = uploads = 0
    for param in offloaded:
        once, every = (param.buffer_bytes, 0) if param.summed else (0, param.buffer_bytes)
        window = param.update_bytes(0) + once
        per_window += window
        per_step += every
        gradients += once
        uploads += plan.sent_bytes(param)
        host += window / param.interval + every
        to_host += once / param.interval + every
        to_device += plan.sent_bytes(param) / param.interval
    return Traffic(
        host=host,
        to_host=to_host,
        to_device=to_device,
        host_per_window=per_window,
        host_per_gradient=per_step,
        gradients_per_window=gradients,
        upload_per_window=uploads,
        forward_loads=forward,
        backward_loads=backward,
        rewritten=sum(plan.load_bytes(param) for param in plan.params if plan.rewrites_weight(param)),
        state=state,
        files=sum(param.file_bytes / param.interval for param in plan.params_in_turn),
        files_per_window=plan.bytes_in_turn,
        blocking=all(param.blocking for param in offloaded),
    )
