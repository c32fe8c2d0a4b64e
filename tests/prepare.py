"""``python -m tests.prepare``: download what no test should wait for, and show the progress.

The jars of every BookKeeper version that the suite runs, about 100 MB each, once on a machine;
those of BookKeeper's HTTP server, and of Pulsar's metadata driver.
With ``--default-only``, only those of the default version of a local cluster.
"""

import sys
from pathlib import Path

from daemon.local import jars
from daemon.local.java import Java
from ledgers.errors import BookmenderError

VERSIONS = (jars.BOOKKEEPER_DEFAULT, "4.17.3", "4.16.6")
HTTP_SERVER = jars.Module("org.apache.bookkeeper.http", "vertx-http-server")
"""BookKeeper's own HTTP server and the Vert.x that it needs: 15 MB."""
PULSAR = "4.0.8"
PULSAR_DRIVER = jars.Module("org.apache.pulsar", "pulsar-metadata")
BESIDE_PULSAR_DRIVER = [
    (jars.Module(organisation, name), version)
    for organisation, version, *names in (
        ("org.apache.pulsar", PULSAR, "pulsar-common", "pulsar-client-api"),
        ("org.apache.pulsar", PULSAR, "pulsar-client-admin-api"),
        ("io.opentelemetry", "1.45.0", "opentelemetry-api", "opentelemetry-context"),
        ("io.prometheus", "0.16.0", "simpleclient", "simpleclient_caffeine"),
        ("com.github.ben-manes.caffeine", "2.9.1", "caffeine"),
        ("com.fasterxml.jackson.module", "2.17.1", "jackson-module-parameter-names"),
        ("com.fasterxml.jackson.datatype", "2.17.1", "jackson-datatype-jdk8"),
        ("com.fasterxml.jackson.datatype", "2.17.1", "jackson-datatype-jsr310"),
        ("com.fasterxml.jackson.dataformat", "2.17.1", "jackson-dataformat-yaml"),
    )
    for name in names
]
"""What Pulsar's metadata driver needs besides the jars of BookKeeper 4.17.3, 3 MB. All that it
depends on would be 104 MB, mostly for other metadata stores than ZooKeeper."""
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
            jars.fetch(VERSIONS[0], java, module=HTTP_SERVER)
            fetch_pulsar_driver(java)
    except BookmenderError as error:
        sys.exit(f"tests: {error}")


def fetch_pulsar_driver(java: Java) -> Path:
    """Return the folder with the jars of Pulsar's metadata driver. Downloads them if necessary."""
    return jars.fetch(PULSAR, java, module=PULSAR_DRIVER, beside=BESIDE_PULSAR_DRIVER)


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
