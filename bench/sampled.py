"""bookmender with a thread beside it that keeps looking where the others are: ``python -m
bench.sampled``.

Each look charges the CPU time that a thread used since the look before to where it is now, so that
waiting costs nothing. It sees a thread only where the interpreter may switch to another one; with
the switch interval set low that is at most a fraction of a millisecond after the moment it asked
for.
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
"""Frames of a stack that are kept, innermost first."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """CPU time of one thread. ``stack``: ``path:function``, innermost first."""

    at_s: float
    cpu_s: float
    stack: tuple[str, ...]


class Sampler:
    """Looks on until it is stopped. ``samples`` grow on its thread alone."""

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
        with suppress(OSError):  # it has just ended
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
    """``OUTPUT ARGUMENT...``: run the command, then write the samples as JSON."""
    output = sys.argv.pop(1)
    sampler = Sampler()
    sampler.start()
    try:
        from daemon.cli.main import main as bookmender  # what importing costs is seen, too

        bookmender()
    finally:
        sampler.stop()
        Path(output).write_bytes(msgspec.json.encode(sampler.samples))


if __name__ == "__main__":
    main()
