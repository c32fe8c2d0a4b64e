"""A daemon that soon gives up lost entries of the feed. Run as ``python -m``."""

import sys
from typing import Any

from checkpoints import publisher
from checkpoints.leader_state import FeedSettings
from daemon.cli.main import main

IMPATIENT = FeedSettings(lost_after_s=2.0)

if __name__ == "__main__":
    init = publisher.FeedPublisher.__init__

    def begin(self: publisher.FeedPublisher, **parts: Any) -> None:
        init(self, **parts, settings=IMPATIENT)

    publisher.FeedPublisher.__init__ = begin  # type: ignore[method-assign]
    sys.argv = ["bookmender", "daemon"]
    main()
