"""The entry point ``bookmender``: ends quietly at a Ctrl-C while the rest is still being imported."""

import sys


def main() -> None:
    try:
        from daemon.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # as ``daemon.cli`` ends once it is there
    run()
