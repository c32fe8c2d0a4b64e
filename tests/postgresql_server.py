"""A PostgreSQL server on loopback, in a temporary folder."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from daemon.local.ports import free_ports
from ledgers.errors import SettingsError

PASSWORD = "of the tests"
START_TIMEOUT_S = 60


def find_binaries() -> Path:
    """Return the folder of initdb and postgres. Raises SettingsError if there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not installed and on_path is None:
        raise SettingsError(
            "PostgreSQL is needed for tests of its store: install it "
            "(Debian: apt install postgresql)"
        )
    return installed[-1].parent if installed else Path(str(on_path)).resolve().parent


@contextmanager
def running_postgresql() -> Iterator[str]:
    """Yield the URL of an empty database. The server ends with the block."""
    binaries = find_binaries()
    with TemporaryDirectory(prefix="postgresql-") as name:
        folder, user = Path(name), _user()
        if user is not None:
            shutil.chown(folder, user=user)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o644)
        (port,) = free_ports(1)
        _run(
            [
                *(str(binaries / "initdb"), "--pgdata", str(folder / "data")),
                *("--username", "tester", "--pwfile", str(folder / "password")),
                *("--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--no-sync"),
            ],
            user,
            folder,
        )
        options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder} -c fsync=off"
        control = [str(binaries / "pg_ctl"), "--pgdata", str(folder / "data"), "--wait", "--silent"]
        log = ["--log", str(folder / "log"), "--timeout", str(START_TIMEOUT_S)]
        _run([*control, *log, "--options", options, "start"], user, folder)
        try:
            password = PASSWORD.replace(" ", "%20")
            yield f"postgresql://tester:{password}@127.0.0.1:{port}/postgres"
        finally:
            _run([*control, "--mode", "immediate", "stop"], user, folder)


def _run(command: list[str], user: str | None, folder: Path) -> None:
    # A file, not a pipe: the server inherits it and would keep a pipe open.
    with TemporaryFile() as output:
        done = subprocess.run(
            command,
            cwd=folder,
            user=user,
            extra_groups=None if user is None else [],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=2 * START_TIMEOUT_S,
            check=False,
        )
        output.seek(0)
        assert done.returncode == 0, f"{command[0]}: {output.read().decode(errors='replace')}"


def _user() -> str | None:
    """Return the user that runs the server, if it must be another one: initdb refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise SettingsError("PostgreSQL does not run as root, and there is no other user")
