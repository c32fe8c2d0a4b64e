"""Where commands find their settings if no option names a file."""

import os
import re
from pathlib import Path

import pytest

from daemon import settings_source
from daemon.local import folder
from daemon.local.spec import ClusterSpec, settle
from daemon.settings import CONFIG_VARIABLE
from daemon.settings_source import LOCAL_CLUSTER, URI, find_source
from ledgers.errors import SettingsError
from tests.daemon.cli_calls import exit_code

ROOT = Path(__file__).parents[2]
ADDRESS = "zk+hierarchical://zk1:2181/ledgers"
VARIABLE = "BOOKMENDER_METADATA_SERVICE_URI"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any settings, on a host without any."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(settings_source, "HOST_FILE", tmp_path / "etc" / "bookmender.toml")
    return tmp_path


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{URI} = '{ADDRESS}'\n")
    return path


def running_cluster(data: Path) -> ClusterSpec:
    """Make the data folder of a cluster, and return its spec. Lease the folder to run it."""
    spec = settle(None, bookie_count=1, asked={})
    data.mkdir(parents=True)
    spec.save(data)
    return spec


def test_the_first_of_the_files_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    found.append(find_source(None, os.environ).file)
    write(settings_source.HOST_FILE)
    found.append(find_source(None, os.environ).file)
    ours = write(home / "bookmender" / "bookmender.toml")
    found.append(find_source(None, os.environ).file)
    named = write(home / "named.toml")
    found.append(find_source(None, os.environ | {CONFIG_VARIABLE: str(named)}).file)
    found.append(find_source(Path("given"), os.environ | {CONFIG_VARIABLE: str(named)}).file)

    assert found == [None, settings_source.HOST_FILE, ours, named, Path("given")]


def test_the_environment_overrides_a_file_that_was_found(home: Path) -> None:
    write(settings_source.HOST_FILE)

    settings = find_source(None, os.environ | {"BOOKMENDER_LOG_LEVEL": "error"}).load()

    assert (settings.metadata_service_uri, settings.log.level) == (ADDRESS, "error")


def test_without_settings_a_running_local_cluster_is_used(home: Path) -> None:
    data = folder.default_data()
    spec = running_cluster(data)
    with folder.lease(data):
        settings, sources = find_source(None, os.environ).load_with_sources()
        elsewhere = find_source(None, os.environ | {VARIABLE: ADDRESS})
    stopped = find_source(None, os.environ)

    assert settings.metadata_service_uri == spec.metadata_service_uri
    assert sources == {URI: f"{LOCAL_CLUSTER}{data}"}
    assert (elsewhere.local_cluster, stopped.local_cluster) == (None, None)


def test_without_any_settings_the_error_names_the_places(home: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        find_source(None, os.environ).load()

    for place in (home / "bookmender" / "bookmender.toml", settings_source.HOST_FILE):
        assert str(place) in str(raised.value)


def test_a_file_that_may_not_be_read_is_an_error_that_names_its_owner(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(settings_source.HOST_FILE)
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(SettingsError, match=f"permission denied.*owner {file.owner()}, group"):
        find_source(None, os.environ)


def test_a_variable_that_names_no_file_is_an_error(home: Path) -> None:
    with pytest.raises(SettingsError, match=f"{CONFIG_VARIABLE} is /no/file"):
        find_source(None, {CONFIG_VARIABLE: "/no/file"})


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("-c FILE config show", id="before the command"),
        pytest.param("config -c FILE show", id="within a group"),
        pytest.param("config show -c FILE", id="after the command"),
    ],
)
def test_the_option_is_accepted_anywhere(
    arguments: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write(home / "given.toml"))

    code = exit_code(monkeypatch, *arguments.replace("FILE", file).split())

    assert (code, ADDRESS in capsys.readouterr().out) == (0, True)


def test_every_command_finds_its_settings_in_this_way() -> None:
    """Only these read one file that is given: a file to check, and that of the local cluster."""
    others = {"cli/config.py", "cli/local.py"}

    found = {
        path.relative_to(ROOT / "daemon").as_posix()
        for package in ("cli", "status", "fsck", "local")
        for path in (ROOT / "daemon" / package).rglob("*.py")
        if re.search(r"\bload_settings\(", path.read_text())
    }

    assert found == others
