"""The entry point ``bookmender``. Handles Ctrl-C while the other modules are still being
imported."""

import sys


def main() -> None:
    try:
        from daemon.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # the same exit code as in ``daemon.cli.main``
    run()
