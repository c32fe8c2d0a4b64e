"""The state directory of this process on the local disk."""

import os
import socket
from pathlib import Path

from daemon.home import home_folder
from daemon.settings import Settings
from ledgers.errors import SettingsError
from replication.journal import MetadataJournal

JOURNAL_FOLDER = "journal"


def open_journal(settings: Settings) -> MetadataJournal:
    """Open the journal of metadata writes. Raises SettingsError if its directory is not
    writable."""
    directory = state_dir(settings) / JOURNAL_FOLDER
    try:
        return MetadataJournal(directory, process=f"{socket.gethostname()}-{os.getpid()}")
    except OSError as error:
        raise SettingsError(
            f"node.state_dir: {directory} cannot be written to ({error.strerror}); "
            "metadata is changed only after the old metadata is recorded there. Grant this user "
            "write access, or set another folder",
            setting="node.state_dir",
        ) from error


def state_dir(settings: Settings) -> Path:
    """Return the configured directory, else systemd's, else the user's."""
    if settings.node.state_dir:
        return Path(settings.node.state_dir)
    if systemd := os.environ.get("STATE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    home = Path(os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state")
    return home / "bookmender"
