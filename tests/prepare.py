"""``python -m tests.prepare``: fetches what no test should wait for, and says how far it is.

BookKeeper's jars, of every version that the suite runs: about 100 MB each, once on a machine; and
those of an old ZooKeeper. With ``--default-only`` just those of the version that a local cluster
has by default.
"""

import sys

from daemon.local import jars
from daemon.local.java import Java
from ledgers.errors import BookmenderError

VERSIONS = (jars.BOOKKEEPER_DEFAULT, "4.17.3", "4.16.6")
OLD_ZOOKEEPER = "3.5.10"
"""The last that watches no trees and joins no reads."""
PROGRESS_EVERY = 20


def main() -> None:
    is_default_only = sys.argv[1:] == ["--default-only"]
    versions = VERSIONS[:1] if is_default_only else VERSIONS
    try:
        java = Java.find()
        for version in versions:
            if not jars.jars_folder(version).exists():
                print(
                    f"Fetching BookKeeper {version}, once: about 100 MB, a minute or two.",
                    flush=True,
                )
                jars.fetch(version, java, on_progress=_Progress().show)
        if not is_default_only:
            jars.fetch(OLD_ZOOKEEPER, java, module=jars.ZOOKEEPER)
    except BookmenderError as error:
        sys.exit(f"tests: {error}")


class _Progress:
    """A line every so many jars."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, fetched: int, total: int | None) -> None:
        if total is not None and fetched >= self._shown + PROGRESS_EVERY:
            self._shown = fetched
            print(f"  {fetched} of {total} jars", flush=True)


if __name__ == "__main__":
    main()
