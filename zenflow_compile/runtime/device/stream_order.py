"""Orders the device work of an engine that user code runs in several streams."""

from __future__ import annotations

from zenflow_compile.runtime.device.device import Stream, Streams


class StreamOrder:
    """Makes the work of an engine run in the order of its calls, whatever the stream of each call.

    PyTorch joins the streams of a backward with that of its caller where it accumulates gradients, but gradients that a
    graph offloads never get there. Engine memory (selected slices, norms, staging buffers, the accumulator) passes from
    one call to the next, so each call on another stream first waits for the stream of the last one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Stream | None = None

    def follow(self) -> None:
        """Call it before the calling thread queues work on engine memory."""
        current, last = self._streams.current(), self._last
        if last is not None and last != current:
            current.wait_stream(last)
        self._last = current
