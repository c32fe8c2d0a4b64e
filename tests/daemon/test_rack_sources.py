"""Racks from a file and from a script."""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from daemon.node import run_node
from daemon.placement import (
    ASK_INTERVAL_S,
    HOSTS_MAX,
    LOOK_INTERVAL_S,
    FileRacks,
    ScriptRacks,
    check_rack_sources,
    parse_rack_file,
    resolve_host,
    run_bounded,
)
from daemon.settings import Settings
from ledgers.errors import CorruptionError, SettingsError, UnavailableError
from replication.settings import PlacementSettings
from tests.ledgers.client_cases import ManualClock


def test_a_file_names_bookies_and_their_racks() -> None:
    text = """
        # the ground floor
        bookie-1:3181 = /rack-1
        10.0.0.2 rack-2   # by its address
        bookie-3=/region/rack-3
    """

    assert parse_rack_file(text) == {
        "bookie-1:3181": "/rack-1",
        "10.0.0.2": "/rack-2",
        "bookie-3": "/region/rack-3",
    }


@pytest.mark.parametrize("line", ["bookie-1", "bookie-1 = /", "bookie-1 = /a /b", "= /a"])
def test_a_line_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(CorruptionError, match="line 2 is not of the form 'bookie = /rack'"):
        parse_rack_file(f"bookie-0 = /a\n{line}\n")


def read(source: FileRacks | ScriptRacks, *hosts: str) -> Mapping[str, str]:
    return asyncio.run(source.read(hosts))


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "racks"
    path.write_text("bookie-1 = /a\n")

    assert read(FileRacks(path, ManualClock())) == {"bookie-1": "/a"}


def test_a_missing_file_is_reported_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"No such file.*or empty placement\.racks_file"):
        read(FileRacks(tmp_path / "none", ManualClock()))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "racks"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(CorruptionError, match="is not UTF-8 text"):
        read(FileRacks(path, ManualClock()))


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "racks"
    clock = ManualClock()

    async def times() -> list[float]:
        changes = FileRacks(path, clock).changes()
        began_s = clock.now_s()
        seen = []
        await anext(changes)
        seen.append(clock.now_s() - began_s)
        for text in ("a = /1\n", "a = /22\n"):
            path.write_text(text)
            await anext(changes)
            seen.append(clock.now_s() - began_s)
        await changes.aclose()
        return seen

    assert asyncio.run(times()) == [0, LOOK_INTERVAL_S, 2 * LOOK_INTERVAL_S]


# --- Scripts --------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that records its arguments and gives each host a rack of its own."""
    path = tmp_path / "racks.sh"
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor host; do echo "/rack-of-$host"; done\n'
    )
    path.chmod(0o755)
    return path


def asked(script: Path) -> list[str]:
    return (script.parent / "asked").read_text().splitlines()


def scripted(tmp_path: Path, body: str, *, timeout_s: float = 0.3) -> ScriptRacks:
    path = tmp_path / "racks.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return ScriptRacks(str(path), ManualClock(), timeout_s=timeout_s)


def test_a_script_gets_hosts_and_prints_racks(script: Path) -> None:
    source = ScriptRacks(f"{script} -v", ManualClock())

    with pytest.raises(CorruptionError, match="one rack for each host"):  # "-v" gets a rack, too
        read(source, "a")
    assert read(ScriptRacks(str(script), ManualClock()), "b", "a") == {
        "a": "/rack-of-a",
        "b": "/rack-of-b",
    }
    assert asked(script) == ["-v a", "a b"]


def test_a_script_is_not_run_again_for_a_while(script: Path) -> None:
    clock = ManualClock()
    source = ScriptRacks(str(script), clock)

    async def scenario() -> None:
        changes = source.changes()
        await anext(changes)
        await source.read(["a"])
        await source.read(["a", "b"])
        began_s = clock.now_s()
        await anext(changes)
        assert clock.now_s() - began_s == ASK_INTERVAL_S
        await source.read(["a", "b"])
        await changes.aclose()

    asyncio.run(scenario())

    assert asked(script) == ["a", "b", "a b"]


def test_a_script_gets_at_most_a_hundred_hosts(script: Path) -> None:
    hosts = [f"host-{number:03}" for number in range(HOSTS_MAX + 1)]

    racks = read(ScriptRacks(str(script), ManualClock()), *hosts)

    assert racks.keys() == set(hosts)
    assert [len(line.split()) for line in asked(script)] == [HOSTS_MAX, 1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("echo no >&2; exit 3", r"failed.*status=3.*said=no", id="it fails"),
        pytest.param("yes | head -c 2000000", "must not print more", id="it prints too much"),
        pytest.param("sleep 60", "took too long, and was killed", id="it hangs"),
        pytest.param("sleep 60 & sleep 60", "took too long", id="it hangs with its child"),
    ],
)
def test_a_script_that_fails_or_hangs_is_reported(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        read(scripted(tmp_path, body), "a")


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"

    with pytest.raises(UnavailableError):
        run_bounded(["/bin/sh", "-c", f"sleep 60 & echo $! > {note}; wait"], 0.3)

    assert ends(int(note.read_text()))


def ends(pid: int) -> bool:
    """Return True if the process has ended, or does so when its new parent reaps it."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_stop_ends_a_script_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    body = f"sleep 60 & echo $! > {note}.new; mv {note}.new {note}; wait"
    source = scripted(tmp_path, body, timeout_s=60)

    async def stopped() -> None:
        reading = asyncio.create_task(source.read(["a"]))
        while not note.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        reading.cancel()

    asyncio.run(stopped())

    assert ends(int(note.read_text()))


def test_a_stop_does_not_wait_for_a_file_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "racks"
    os.mkfifo(path)  # no process writes to it

    async def stopped() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await FileRacks(path, ManualClock()).read([])

    asyncio.run(stopped())


def test_a_scripts_running_child_does_not_block_the_result(tmp_path: Path) -> None:
    assert read(scripted(tmp_path, "sleep 2 & echo /a"), "host") == {"host": "/a"}


def test_a_missing_script_is_reported_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot be run.*or empty placement\.racks_script"):
        read(ScriptRacks(str(tmp_path / "none"), ManualClock()), "a")


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "ip"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="an address stays"),
        pytest.param("x" * 70, None, id="not a host name"),
    ],
)
def test_a_host_is_resolved_if_possible(host: str, ip: str | None) -> None:
    assert asyncio.run(resolve_host(host)) == ip


# --- Checks at the start --------------------------------------------------------------------------


def test_usable_rack_sources_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "racks").touch()

    check_rack_sources(PlacementSettings())
    check_rack_sources(PlacementSettings(racks_file=str(tmp_path / "racks")))
    check_rack_sources(PlacementSettings(racks_script="sh -c 'echo /a'"))
    check_rack_sources(PlacementSettings(racks_znode="/bookies"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("racks_file", "/no/such/racks", id="no file"),
        pytest.param("racks_file", "/", id="a folder"),
        pytest.param("racks_script", "/no/such/script", id="no script"),
        pytest.param("racks_script", "no-such-command --rack", id="no command"),
        pytest.param("racks_script", "'", id="an open quotation mark"),
        pytest.param("racks_script", "/", id="a folder for a script"),
    ],
)
def test_a_missing_rack_source_is_refused(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"placement.{key}") as refused:
        check_rack_sources(PlacementSettings(**{key: value}))  # type: ignore[arg-type]

    assert refused.value.setting == f"placement.{key}"


def test_a_node_checks_its_rack_source_first(tmp_path: Path) -> None:
    settings = Settings(
        metadata_service_uri="zk://127.0.0.1:1/ledgers",
        placement=PlacementSettings(racks_file="/no/such/racks"),
    )

    with pytest.raises(SettingsError, match=r"placement\.racks_file"):
        run_node(settings, read_settings=lambda: settings)
