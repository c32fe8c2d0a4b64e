"""Helpers that the tests of the settings share: a file, an environment, and errors."""

from pathlib import Path

import pytest

from daemon.settings import Settings, load_settings
from ledgers.errors import SettingsError

URI = "zk+hierarchical://127.0.0.1:2181/ledgers"
URI_LINE = f'metadata_service_uri = "{URI}"\n'
VARIABLE = "BOOKMENDER_METADATA_SERVICE_URI"


def load(tmp_path: Path, text: str = URI_LINE, **environment: str) -> Settings:
    path = tmp_path / "bookmender.toml"
    path.write_text(text)
    return load_settings(path, {f"BOOKMENDER_{key}": value for key, value in environment.items()})


def refused(tmp_path: Path, text: str = URI_LINE, **environment: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text, **environment)
    return str(caught.value)
