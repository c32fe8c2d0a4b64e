"""The home folder and the name of the user who runs this process.

In a container the user id may have neither, because no line of ``/etc/passwd`` has it.
"""

import os
import pwd
from pathlib import Path

from ledgers.errors import SettingsError


def home_folder() -> Path:
    """Return the home folder. Raises SettingsError if the user has none."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise SettingsError(
            f"the user id {os.getuid()} has no home folder. Set HOME to a folder that it may write "
            "to"
        ) from error


def has_name() -> bool:
    """Return True if the user id has an entry in the user database."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True
