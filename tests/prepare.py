"""``python -m tests.prepare``: download what no test should wait for, and show the progress.

The jars of every BookKeeper version that the suite runs, 100 MB each, once on a machine;
those of BookKeeper's HTTP server, and of Pulsar's metadata driver.
With ``--default-only``, only those of the default version of a local cluster.
"""

import sys
from pathlib import Path

from daemon.local import jars
from ledgers.errors import BookmenderError

VERSIONS = tuple(jars.versions())
HTTP_SERVER = "vertx-http-server-4.18.0"
"""BookKeeper's own HTTP server and the Vert.x that it needs: 15 MB."""
PULSAR_DRIVER = "pulsar-metadata-4.0.8"
"""What Pulsar's metadata driver needs besides the jars of BookKeeper 4.17.3, 3 MB. All that it
depends on would be 104 MB, mostly for other metadata stores than ZooKeeper."""
LISTS = Path(__file__).with_name("jar_lists")
PROGRESS_EVERY = 20


def main() -> None:
    is_default_only = sys.argv[1:] == ["--default-only"]
    try:
        for version in (jars.BOOKKEEPER_DEFAULT,) if is_default_only else VERSIONS:
            jars.fetch(version, on_progress=_show)
        if not is_default_only:
            fetch_for_tests(HTTP_SERVER)
            fetch_for_tests(PULSAR_DRIVER)
    except BookmenderError as error:
        sys.exit(f"tests: {error}")


def fetch_for_tests(name: str) -> Path:
    """Return the folder with the jars of one of our own lists. Downloads them if necessary."""
    return jars.fetch(name, lists=LISTS)


def _show(done: int, total: int) -> None:
    if done % PROGRESS_EVERY == 0:
        print(f"BookKeeper's jars, downloaded once: {done} of {total}", flush=True)


if __name__ == "__main__":
    main()
