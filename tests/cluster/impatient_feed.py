"""A daemon that soon gives up lost entries of the feed. Run as ``python -m``."""

import sys
from functools import partial

from checkpoints import publisher
from daemon.cli.main import main

LOST_AFTER_S = 2.0

if __name__ == "__main__":
    publisher.FeedSettings = partial(  # type: ignore[assignment, misc]
        publisher.FeedSettings, lost_after_s=LOST_AFTER_S
    )
    sys.argv = ["bookmender", "daemon"]
    main()
