"""The home folder of a user id that may have none."""

import os
import pwd
from pathlib import Path

import pytest

from daemon.home import has_name, home_folder
from ledgers.errors import SettingsError


def test_a_user_id_without_an_entry_has_the_home_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def nobody(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (has_name(), home_folder()) == (False, tmp_path)

    monkeypatch.delenv("HOME")
    with pytest.raises(SettingsError, match=f"{os.getuid()} has no home folder. Set HOME"):
        home_folder()
