"""Messages from another thread to the loop."""

import asyncio
import threading
from typing import Any

from ledgers.zookeeper.kazoo_session import LoopInbox


def test_messages_arrive_on_the_loop_in_their_order() -> None:
    heard: list[tuple[int, str]] = []

    async def main() -> None:
        inbox, done = LoopInbox(asyncio.get_running_loop()), asyncio.Event()

        def speak() -> None:
            for number in range(10_000):
                inbox.post(lambda n: heard.append((n, threading.current_thread().name)), number)
            inbox.post(done.set)

        threading.Thread(target=speak, name="speaker").start()
        await done.wait()

    asyncio.run(main())

    assert heard == [(number, threading.current_thread().name) for number in range(10_000)]


def test_a_message_that_fails_does_not_drop_later_ones() -> None:
    heard: list[str] = []
    failures: list[dict[str, Any]] = []

    def fail() -> None:
        raise ValueError("bad news")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        inbox = LoopInbox(loop)
        inbox.post(fail)
        inbox.post(heard.append, "good news")
        await asyncio.sleep(0)

    asyncio.run(main())

    assert heard == ["good news"]
    assert [str(failure["exception"]) for failure in failures] == ["bad news"]


def test_messages_after_the_loop_is_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    inbox = LoopInbox(loop)
    loop.close()

    inbox.post(print, "this is dropped")
    inbox.post(print, "nor this")
