"""Runs bookmender with a sampler thread that records where the other threads are: ``python -m
bench.sampled``.

Each sample charges the CPU time that a thread has used since the last sample to its current place,
so waiting costs nothing. The sampler sees a thread only where the interpreter may switch to another
one. With a short switch interval that is at most a fraction of a millisecond after the intended
moment.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

LOOK_EVERY_S = 0.001
SWITCH_INTERVAL_S = 0.00005
DEPTH_MAX = 12
"""Number of frames kept of a stack, innermost first."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """CPU time of one thread at one place. ``stack``: ``path:function``, innermost first."""

    at_s: float
    cpu_s: float
    stack: tuple[str, ...]


class Sampler:
    """Samples the other threads until it is stopped. Only its thread appends to ``samples``."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._used_s: dict[int, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        while not self._stopping.wait(LOOK_EVERY_S):
            at_s = time.monotonic()
            for thread_id, frame in sys._current_frames().items():
                if thread_id != self._thread.ident:
                    self._look(at_s, thread_id, frame)

    def _look(self, at_s: float, thread_id: int, frame: FrameType) -> None:
        with suppress(OSError):  # the thread has just ended
            used_s = time.clock_gettime(time.pthread_getcpuclockid(thread_id))
            since_s = used_s - self._used_s.get(thread_id, used_s)
            self._used_s[thread_id] = used_s
            if since_s > 0:
                stack = tuple(
                    name for name, _ in zip(_names(frame), range(DEPTH_MAX), strict=False)
                )
                self.samples.append(Sample(at_s=at_s, cpu_s=since_s, stack=stack))


def _names(innermost: FrameType) -> Iterator[str]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        frame = frame.f_back


def main() -> None:
    """Run the command and write the samples as JSON. Arguments: ``OUTPUT ARGUMENT...``."""
    output = sys.argv.pop(1)
    sampler = Sampler()
    sampler.start()
    try:
        from daemon.cli.main import main as bookmender  # imported here to sample the import, too

        bookmender()
    finally:
        sampler.stop()
        Path(output).write_bytes(msgspec.json.encode(sampler.samples))


if __name__ == "__main__":
    main()
