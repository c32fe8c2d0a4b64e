"""The spec of a local cluster: chosen, stored, and found again."""

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


def test_a_new_cluster_gets_distinct_ports() -> None:
    """The ports are outside the range of outgoing connections."""
    spec = settle(None, bookie_count=None, asked={})

    ports = {spec.zookeeper_port, *spec.bookie_ports}
    assert len(ports) == 6, "ZooKeeper and five bookies"
    assert all(PORT_FIRST <= port < PORT_LAST for port in ports)


def test_requested_values_win() -> None:
    spec = settle(None, bookie_count=1, asked={"storage": Storage.DB, "zookeeper_port": 2181})

    assert spec.storage is Storage.DB
    assert spec.zookeeper_port == 2181


def test_an_existing_cluster_keeps_its_spec() -> None:
    asked = {"storage": Storage.DB, "layout": Layout.HIERARCHICAL}

    assert settle(SAVED, bookie_count=None, asked={}) == SAVED
    assert settle(SAVED, bookie_count=2, asked=asked) == SAVED


def test_requesting_more_bookies_adds_some() -> None:
    spec = settle(SAVED, bookie_count=4, asked={})

    assert len(spec.bookies) == 4
    assert spec.bookies[:2] == SAVED.bookies


def test_a_secured_cluster_is_addressed_by_its_tls_port_and_stays_secured() -> None:
    spec = settle(None, bookie_count=1, asked={}, is_secured=True)

    assert (
        MetadataUri.parse(spec.metadata_service_uri).hosts == f"127.0.0.1:{spec.zookeeper_tls_port}"
    )
    assert spec.zookeeper_tls_port not in (None, spec.zookeeper_port, *spec.bookie_ports)
    assert settle(spec, bookie_count=None, asked={}) == spec
    assert settle(spec, bookie_count=None, asked={}, is_secured=True) == spec


def test_another_version_may_serve_the_same_data() -> None:
    spec = settle(SAVED, bookie_count=None, asked={"bookkeeper": "4.17.3"})

    assert spec == dataclasses.replace(SAVED, bookkeeper="4.17.3")


@pytest.mark.parametrize(
    ("bookie_count", "asked", "complaint"),
    [
        pytest.param(None, {"is_secured": True}, "without TLS and SASL", id="not secured"),
        pytest.param(1, {}, "2 bookies", id="fewer bookies would lose data"),
        pytest.param(None, {"storage": Storage.SORTED}, "storage db", id="another storage"),
        pytest.param(None, {"layout": Layout.FLAT}, "layout hierarchical", id="another layout"),
    ],
)
def test_existing_data_cannot_change_its_format(
    bookie_count: int | None, asked: dict[str, object], complaint: str
) -> None:
    is_secured = bool(asked.pop("is_secured", False))

    with pytest.raises(SettingsError, match=complaint):
        settle(SAVED, bookie_count=bookie_count, asked=asked, is_secured=is_secured)


def test_too_short_session_timeouts_are_refused() -> None:
    with pytest.raises(SettingsError, match="session"):
        settle(None, bookie_count=1, asked={"session_timeout_s": 0.5})


def test_a_saved_spec_is_loaded_unchanged(tmp_path: Path) -> None:
    assert ClusterSpec.load(tmp_path) is None
    SAVED.save(tmp_path)

    assert ClusterSpec.load(tmp_path) == SAVED
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="truncated"),
        pytest.param('{"zookeeper_port": 1}', id="a field is missing"),
        pytest.param(
            '{"version": 2, "zookeeper_port": 1, "bookie_ports": []}', id="of another release"
        ),
    ],
)
def test_an_unreadable_spec_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)

    with pytest.raises(SettingsError, match=FILE_NAME):
        ClusterSpec.load(tmp_path)


@pytest.mark.parametrize("layout", Layout)
def test_the_uri_can_be_parsed(layout: Layout) -> None:
    uri = MetadataUri.parse(dataclasses.replace(SAVED, layout=layout).metadata_service_uri)

    assert uri.hosts == "127.0.0.1:20001"
    # The legacy layout has no name in a URI; only the znode LAYOUT has it.
    assert uri.layout is (None if layout is Layout.LEGACY_HIERARCHICAL else layout)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2", id="by its number"),
        pytest.param("20003", id="by its port"),
        pytest.param("127.0.0.1:20003", id="by its id"),
    ],
)
def test_a_bookie_is_found_by_number_port_or_id(name: str) -> None:
    assert find_bookie(SAVED.bookies, name) == BookieId("127.0.0.1:20003")


@pytest.mark.parametrize("name", ["0", "3", "20001", "", "bookie"])
def test_an_unknown_bookie_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError, match=r"127.0.0.1:20002.*127.0.0.1:20003"):
        find_bookie(SAVED.bookies, name)
