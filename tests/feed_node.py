"""A node whose feed begins a log ledger and a base every few seconds, not every few hours.

``python -m tests.feed_node daemon``, as ``python -m daemon daemon``. So kills also hit these steps.
"""

from typing import Any

from checkpoints import housekeeping, publisher
from checkpoints.leader_state import FeedSettings
from daemon.cli.main import main

SETTINGS = FeedSettings(roll_age_s=2.0, base_age_s=3.0)
HOUSEKEEPING_S = 1.0


def install() -> None:
    init = publisher.FeedPublisher.__init__

    def begin(self: publisher.FeedPublisher, **parts: Any) -> None:
        init(self, **parts, settings=SETTINGS)

    publisher.FeedPublisher.__init__ = begin  # type: ignore[method-assign]
    housekeeping.HOUSEKEEPING_S = HOUSEKEEPING_S


if __name__ == "__main__":
    install()
    main()
