"""``python -m tests.prepare``: download what no test should wait for, and show the progress.

The jars of every BookKeeper version that the suite runs, about 100 MB each, once on a machine;
those of BookKeeper's HTTP server and metrics, and of an old ZooKeeper. With ``--default-only``,
only those of the default version of a local cluster.
"""

import sys

from daemon.local import jars
from daemon.local.java import Java
from ledgers.errors import BookmenderError

VERSIONS = (jars.BOOKKEEPER_DEFAULT, "4.17.3", "4.16.6")
OLD_ZOOKEEPER = "3.5.10"
"""The last version without recursive watches and joined reads."""
HTTP_SERVER = jars.Module("org.apache.bookkeeper.http", "vertx-http-server")
"""BookKeeper's own HTTP server and the Vert.x that it needs: 15 MB."""
METRICS_PROVIDER = jars.Module("org.apache.bookkeeper.stats", "prometheus-metrics-provider")
"""What Java's AutoRecovery needs to export its metrics to Prometheus: 11 MB."""
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
            jars.fetch(VERSIONS[0], java, module=HTTP_SERVER)
            jars.fetch(VERSIONS[0], java, module=METRICS_PROVIDER)
    except BookmenderError as error:
        sys.exit(f"tests: {error}")


class _Progress:
    """Prints a line for every so many jars."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, fetched: int, total: int | None) -> None:
        if total is not None and fetched >= self._shown + PROGRESS_EVERY:
            self._shown = fetched
            print(f"  {fetched} of {total} jars", flush=True)


if __name__ == "__main__":
    main()
