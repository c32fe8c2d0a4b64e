"""What a local cluster is made of: chosen, kept, and found again."""

import dataclasses
from pathlib import Path

import pytest

from daemon.local.ports import PORT_FIRST, PORT_LAST
from daemon.local.spec import FILE_NAME, ClusterSpec, Storage, find_bookie, settle
from ledgers.codec.layout import Layout, MetadataUri
from ledgers.errors import SettingsError
from ledgers.model import BookieId

SAVED = ClusterSpec(
    storage=Storage.DB,
    session_timeout_s=4.0,
    bookie_settings={"gcWaitTime": "1000"},
    zookeeper_port=20_001,
    bookie_ports=(20_002, 20_003),
)


def test_a_new_cluster_gets_distinct_ports_out_of_the_way_of_outgoing_connections() -> None:
    spec = settle(None, bookie_count=7, asked={})

    ports = {spec.zookeeper_port, *spec.bookie_ports}
    assert len(ports) == 8
    assert all(PORT_FIRST <= port < PORT_LAST for port in ports)


def test_a_new_cluster_has_five_bookies() -> None:
    assert len(settle(None, bookie_count=None, asked={}).bookies) == 5


def test_what_is_asked_for_wins() -> None:
    spec = settle(None, bookie_count=1, asked={"storage": Storage.DB, "zookeeper_port": 2181})

    assert spec.storage is Storage.DB
    assert spec.zookeeper_port == 2181


def test_a_cluster_comes_back_as_it_was() -> None:
    assert settle(SAVED, bookie_count=None, asked={}) == SAVED


def test_asking_for_what_is_there_changes_nothing() -> None:
    asked = {"storage": Storage.DB, "layout": Layout.HIERARCHICAL}

    assert settle(SAVED, bookie_count=2, asked=asked) == SAVED


def test_asking_for_more_bookies_adds_some() -> None:
    spec = settle(SAVED, bookie_count=4, asked={})

    assert len(spec.bookies) == 4
    assert spec.bookies[:2] == SAVED.bookies


def test_another_version_may_serve_the_same_data() -> None:
    spec = settle(SAVED, bookie_count=None, asked={"bookkeeper": "4.17.3"})

    assert spec == dataclasses.replace(SAVED, bookkeeper="4.17.3")


@pytest.mark.parametrize(
    ("bookie_count", "asked", "complaint"),
    [
        pytest.param(1, {}, "2 bookies", id="fewer bookies would lose data"),
        pytest.param(None, {"storage": Storage.SORTED}, "storage db", id="another storage"),
        pytest.param(None, {"layout": Layout.FLAT}, "layout hierarchical", id="another layout"),
    ],
)
def test_data_cannot_become_something_else(
    bookie_count: int | None, asked: dict[str, object], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        settle(SAVED, bookie_count=bookie_count, asked=asked)


def test_session_timeouts_that_zookeeper_cannot_keep_are_refused() -> None:
    with pytest.raises(SettingsError, match="session"):
        settle(None, bookie_count=1, asked={"session_timeout_s": 0.5})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    SAVED.save(tmp_path)

    assert ClusterSpec.load(tmp_path) == SAVED
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_folder_without_a_cluster_has_no_spec(tmp_path: Path) -> None:
    assert ClusterSpec.load(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="cut short"),
        pytest.param('{"zookeeper_port": 1}', id="a field is missing"),
        pytest.param(
            '{"version": 2, "zookeeper_port": 1, "bookie_ports": []}', id="of another release"
        ),
    ],
)
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)

    with pytest.raises(SettingsError, match=FILE_NAME):
        ClusterSpec.load(tmp_path)


@pytest.mark.parametrize("layout", Layout)
def test_the_uri_is_one_that_we_can_read(layout: Layout) -> None:
    uri = MetadataUri.parse(dataclasses.replace(SAVED, layout=layout).metadata_service_uri)

    assert uri.hosts == "127.0.0.1:20001"
    # The legacy layout has no name in a URI: there LAYOUT alone says it.
    assert uri.layout is (None if layout is Layout.LEGACY_HIERARCHICAL else layout)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2", id="by its place in the list"),
        pytest.param("20003", id="by its port"),
        pytest.param("127.0.0.1:20003", id="by its id"),
    ],
)
def test_a_bookie_is_found(name: str) -> None:
    assert find_bookie(SAVED.bookies, name) == BookieId("127.0.0.1:20003")


@pytest.mark.parametrize("name", ["0", "3", "20001", "", "bookie"])
def test_a_bookie_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(SettingsError, match=r"127.0.0.1:20002.*127.0.0.1:20003"):
        find_bookie(SAVED.bookies, name)
