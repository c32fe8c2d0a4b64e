"""Keep Spark quiet when a run is interrupted."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HUSH_S = 1.0
"""How long a JVM may take to be told to say no more."""


@contextmanager
def quiet_when_interrupted(
    set_log_level: Callable[[str], None] = lambda level: None,
) -> Iterator[None]:
    """What Spark's tasks say when they are cut short, or a call to the JVM, is no news to whoever
    pressed Ctrl-C.

    Spark's own handler ends them before anybody hears of it as an exception. The level is set on a
    thread of its own: this one may be in the midst of such a call.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        hushing = threading.Thread(target=set_log_level, args=("OFF",), daemon=True)
        hushing.start()
        hushing.join(HUSH_S)
        logging.disable()  # py4j's
        assert callable(before)
        before(number, frame)

    if callable(before):
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # Spark puts one of its own in its place
            signal.signal(signal.SIGINT, before)
