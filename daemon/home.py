"""The user who runs this process: home folder, name, and which files this user may read.

In a container the user id may have no home and no name, because no line of ``/etc/passwd`` has it.
"""

import grp
import os
import pwd
from pathlib import Path

from daemon.words import printable
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


def is_readable(path: Path) -> bool:
    """Return False if there is no such file. Raises SettingsError if this user may not read it."""
    try:
        path.stat()
        if os.access(path, os.R_OK):
            return True
    except PermissionError:  # a folder above that denies access does not hide the file
        pass
    except OSError:
        return False
    raise SettingsError(
        f"{printable(os.fspath(path))} cannot be read: permission denied. Run the command as a "
        f"user who may read it{_owners(path)}"
    )


def _owners(path: Path) -> str:
    """Return owner and group of the file, or of the folder that denies access."""
    for each in (path, *path.parents):
        try:
            status = each.stat()
            owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
        except (OSError, KeyError):
            continue
        return f" (owner {owner.pw_name}, group {group.gr_name})"
    return ""
