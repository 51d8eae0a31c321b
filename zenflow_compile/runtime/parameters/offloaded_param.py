"""One offloaded parameter at run time. A gradient of it lives in stages, each told in a file from top to bottom:

1. ``incoming_gradient``: received, split and copied to the host (``gradient_parts``), shown in ``.grad``
   (``shown_gradient``), and committed to the update window;
2. ``host_state``: in the window, with the state of the deferred slices;
3. ``flushed_updates``: flushed, which makes it a job of the host's workers, uploaded, and merged into the weight;
4. ``weight_sync``, ``host_weight`` and ``host_values``: the weight, which other code may write, and where it is.
"""

from __future__ import annotations

import warnings

from torch.nn import Parameter

from zenflow_compile.checks.validate import user_stacklevel
from zenflow_compile.planning.plan import ParamPlan
from zenflow_compile.runtime import errors
from zenflow_compile.runtime.device.devices import device_of
from zenflow_compile.runtime.device.memory_list import MemoryList
from zenflow_compile.runtime.device_updates.version_counter import VersionCounter
from zenflow_compile.runtime.gradients.engine_gradients import Gradients
from zenflow_compile.runtime.gradients.gradient_record import GradientState
from zenflow_compile.runtime.parameters.device_state import DeviceState
from zenflow_compile.runtime.parameters.flushed_updates import FlushedUpdates
from zenflow_compile.runtime.parameters.gradient_parts import GradientParts
from zenflow_compile.runtime.parameters.host_state import HostState
from zenflow_compile.runtime.parameters.incoming_gradient import IncomingGradient
from zenflow_compile.runtime.parameters.pending_parts import PendingParts
from zenflow_compile.runtime.parameters.shown_gradient import ShownGradient
from zenflow_compile.runtime.parameters.transport import Transport
from zenflow_compile.runtime.parameters.weight_sync import Weights
from zenflow_compile.runtime.sharding import LocalShard
from zenflow_compile.timeline import DeviceEvent


class OffloadedParam:
    """Runtime state of one parameter whose optimizer state lives, in part or completely, on the host.

    Attributes:
        gradient, updates: the stages of the life of its gradients that are told in their files.
        shown, parts: the gradient as ``.grad`` shows it, and its values.
        host, device, weights: what it has on each side.
        uses: how often the engine was told of a read of the weight since the last optimizer step: by a graph, or FSDP2.
        announced: the engine was told of one before that step. FSDP2 tells of every read.
        arriving: when the device has the slices of this parameter that other ranks have updated; None: it has them, or
            the stream that asked last waits for them.
        written: an external write was noticed that other ranks have not been told of.
    """

    def __init__(
        self,
        plan: ParamPlan,
        param: Parameter,
        host: HostState,
        device: DeviceState,
        transport: Transport,
        gradients: Gradients,
        counter: VersionCounter,
    ) -> None:
        self.plan = plan
        self.param = param
        self.host = host
        self.device = device
        self.transport = transport
        self.weights = Weights(plan, param, counter)
        given = host, device, transport, param.device
        self.parts = PendingParts(*given, gradients.scales) if plan.has_pending_gradient else GradientParts(*given)
        self.shown = ShownGradient(plan, param, gradients, self.parts)
        self.gradient = IncomingGradient(self.shown, self.parts)
        self.updates = FlushedUpdates(host, device, self.weights, self.shown, transport)
        self.uses = 0
        self.announced = isinstance(param, LocalShard)
        self.arriving: DeviceEvent | None = None
        self.written = False
        self.weights.reseed(device, host)

    @property
    def window_gradients(self) -> int:
        """Number of gradients in the update window, in buffers or as a sum."""
        window_sum = self.parts.window_sum
        return len(self.host.open) + (0 if window_sum is None else len(window_sum.coefficients))

    def unapplied(self, now: int) -> int:
        """How many gradients at most a flush after ``now`` steps would apply, held back updates included."""
        return self.window_gradients + self.plan.interval * (len(self.host.flushed) - self.updates.due(now))

    def drop_window(self) -> int:
        """Empty the update window without applying its gradients, and return how many there were.

        They stay counted, as the selected slices have counted them: a state dict has one count for both sides.
        """
        count = len(self.host.open)
        self.host.drop_window()
        count += self.parts.drop_window()
        self.host.taken += count
        return count

    # Other ranks, external writes, and failures.

    def receive_weights(self) -> None:
        """Make the device's current stream wait for the slices that other ranks have updated."""
        if (event := self.arriving) is not None:
            self.weights.guard.allow()
            streams = device_of(self.param.device).streams
            assert streams is not None
            with self.transport.recorder.rank_wait():
                streams.current().wait_event(event)
            self.arriving = None
            if (sample := self.weights.sample) is not None and sample.kept is not None:
                sample.kept.copy_(sample.sample)

    def notice_external_write(self, now: int) -> bool:
        """Re-seed the masters if the weights were written elsewhere since the engine's last write.

        An update in flight at that moment is dropped: it was computed from weights that no longer exist. It stays if
        the weights are as they were remembered: then only a parameter that shares the version counter was written.
        Unverified weights are compared with the loaded state instead.

        Returns:
            Whether there was such a write, and it has changed a weight.

        Raises:
            LostUpdateError: an update that the writer should have seen was dropped.
        """
        if not self.weights.written_by_others:
            return False
        self.weights.guard.allow()
        self.transport.device_memory.bring_back()
        arriving, flushed_at_load = self.arriving is not None, self.weights.flushed_at_load
        self.receive_weights()
        # Jobs, and exchanges of slices, write the masters that are compared and re-seeded below.
        self.updates.wait_for_state()
        if self.weights.are_as_expected(self.device):
            self.weights.accept()
            return False
        lost = self.updates.due(now) > 0
        held_back = bool(self.host.flushed) and not lost
        changed = self.drop_updates()
        counter = self.weights.counter
        if lost or (arriving and (changed or not (counter.shared or counter.exposed))):
            raise errors.LostUpdateError(
                f"{self.plan.name} was written while an update of it was on its way, which is lost now; call "
                "optimizer.synchronize() before weights are read or written outside of the compiled model, and create "
                "the optimizer with overlap_step=False if the compiled forward itself writes them"
            )
        if changed and flushed_at_load:
            raise errors.LostUpdateError(
                f"{self.plan.name} was written or loaded after a state that another number of ranks had saved in the "
                "middle of an update window. That window was flushed at loading, and its update is lost now: load the "
                "model's weights first and the optimizer's state after them, as by set_model_state_dict() and "
                "set_optimizer_state_dict(); before weights are written by hand, call optimizer.synchronize()"
            )
        if held_back:
            warnings.warn(
                "updates that staleness=1 had held back are dropped, because their weights were written in the "
                "meantime; call optimizer.flush() before weights are written, or pass staleness=0",
                stacklevel=user_stacklevel(),
            )
        return changed

    def drop_updates(self) -> bool:
        """Drop the updates in flight, and re-seed the masters from the weights. Returns whether that had an effect."""
        dropped = self.updates.drop()
        differs = self.weights.reseed(self.device, self.host)
        self.written = self.written or differs or dropped
        return differs or dropped

    def raise_failures(self) -> None:
        """Raise the error of background work that has failed by now; does not wait.

        Raises:
            RuntimeError: a job or a copy failed, or see ``FlushedUpdates.raise_if_partially_applied``; chained to the
                original error.
        """
        self.updates.raise_if_partially_applied()
        self.host.raise_failures()
        self.parts.raise_failures()
        self.updates.raise_failures()

    def abandon(self) -> None:
        """Drop gradients, update windows and uploads, failed ones too, before a state is loaded."""
        self.gradient.abandon()
        self.updates.forget_failure()
        self.weights.guard.allow()
        self.receive_weights()
        self.updates.drop_upload()
        if (home := self.weights.home) is not None:
            home.reads_failed()
            home.values.updates_dropped()
        self.host.clear_windows()

    def list_memory(self, found: MemoryList) -> None:
        """Add this parameter's device memory. All work in flight must have ended."""
        self.updates.forget_ended()
        self.gradient.list_memory(found)
        self.device.list_memory(found, has_gradient=self.shown.state is GradientState.PARTS)
        found.numbers(buffer.coefficients.grad_scale for buffer in self.host.open)

    @property
    def nbytes(self) -> int:
        """Device memory of this parameter's optimizer state."""
        return self.device.nbytes + self.parts.nbytes
