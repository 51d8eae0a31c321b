"""Orders the device work of an engine that user code runs in several streams."""

from __future__ import annotations

from zenflow_compile.runtime.device.device import Stream, Streams
from zenflow_compile.timeline import DeviceEvent


class StreamOrder:
    """Makes the work of an engine run in the order of its calls, whatever the stream of each call.

    PyTorch joins the streams of a backward with that of its caller where it accumulates gradients, but gradients that a
    graph offloads never get there. Engine memory (selected slices, norms, staging buffers, the accumulator) passes from
    one call to the next, so each call on another stream first waits for the stream of the last one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Stream | None = None
        self._step: tuple[Stream, DeviceEvent] | None = None  # of the last call, if that was an optimizer step

    def follow(self) -> None:
        """Call it before the calling thread queues work on engine memory."""
        current, last = self._streams.current(), self._last
        if last is not None and last != current:
            current.wait_stream(last)
        self._last, self._step = current, None

    def end_step(self) -> None:
        """An optimizer step has queued all of its work."""
        current = self._streams.current()
        event = self._streams.event()
        event.record(current)
        self._last, self._step = current, (current, event)

    def follow_step(self) -> None:
        """Call it instead of ``follow`` where the stream must not wait for what others queued behind the last step.

        FSDP2 reads shards in a stream that runs ahead of the model's forward.
        """
        current, last, step = self._streams.current(), self._last, self._step
        if step is None or last not in (current, step[0]):
            self.follow()
            return
        if last != current:
            current.wait_event(step[1])
        self._last = current
