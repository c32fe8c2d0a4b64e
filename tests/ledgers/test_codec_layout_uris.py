"""Metadata service URIs of real configuration files: Pulsar's, quoted ones, and unsupported
stores."""

import pytest

from ledgers.codec.layout import Layout, MetadataUri
from ledgers.errors import SettingsError


@pytest.mark.parametrize(
    ("written", "hosts", "root"),
    [
        pytest.param("metadata-store:zk:h:2181/ledgers", "h:2181", "/ledgers", id="Pulsar"),
        pytest.param("metadata-store:h:2181/ledgers", "h:2181", "/ledgers", id="without zk"),
        pytest.param("metadata-store:zk:h:2181", "h:2181", "/ledgers", id="without a path"),
        pytest.param("metadata-store:zk:h:2181/", "h:2181", "/ledgers", id="with an empty path"),
        pytest.param("metadata-store:zk:h:2181/c1", "h:2181", "/c1/ledgers", id="with a chroot"),
        pytest.param(
            "metadata-store:zk:h1:2181,h2:2181/ledgers", "h1:2181,h2:2181", "/ledgers", id="commas"
        ),
        pytest.param(
            "metadata-store:zk:h1:2181;h2:2181/ledgers",
            "h1:2181,h2:2181",
            "/ledgers",
            id="semicolons",
        ),
        pytest.param("metadata-store:zk:h1,h2/ledgers", "h1,h2", "/ledgers", id="no ports"),
        pytest.param(
            "metadata-store:zk:[::1]:2181/ledgers", "[::1]:2181", "/ledgers", id="an IPv6 address"
        ),
        pytest.param("metadata-store:zk://h:2181/ledgers", "h:2181", "/ledgers", id="with slashes"),
        pytest.param("Metadata-Store:ZK:h/ledgers", "h", "/ledgers", id="Pulsar in upper case"),
        pytest.param("metadata-store:oxia-zk/ledgers", "oxia-zk", "/ledgers", id="a host's name"),
        pytest.param("  zk://h:2181/ledgers \n", "h:2181", "/ledgers", id="blanks around"),
        pytest.param('"zk://h:2181/ledgers"', "h:2181", "/ledgers", id="quotes"),
        pytest.param(" 'zk+null://h:2181/ledgers' ", "h:2181", "/ledgers", id="blanks and quotes"),
        pytest.param(
            "'metadata-store:zk:h/ledgers'", "h", "/ledgers", id="quotes around a Pulsar URI"
        ),
        pytest.param("zk://h1:2181;h2,h3/ledgers", "h1:2181,h2,h3", "/ledgers", id="mixed marks"),
        pytest.param("ZK+Hierarchical://h:2181/ledgers", "h:2181", "/ledgers", id="upper case"),
    ],
)
def test_a_uri_of_a_configuration_file_is_accepted(written: str, hosts: str, root: str) -> None:
    uri = MetadataUri.parse(written)

    assert (uri.hosts, uri.root) == (hosts, root)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("flat", Layout.FLAT),
        ("hierarchical", Layout.HIERARCHICAL),
        ("legacyhierarchical", Layout.LEGACY_HIERARCHICAL),
        ("longhierarchical", Layout.LONG_HIERARCHICAL),
        ("null", None),
    ],
)
def test_the_scheme_names_the_layout(name: str, layout: Layout | None) -> None:
    assert MetadataUri.parse(f"zk+{name}://h/ledgers").layout is layout


@pytest.mark.parametrize(
    ("written", "pulsar_root"),
    [
        pytest.param("metadata-store:zk:h/ledgers", "/ledgers/ledgers", id="a path to the root"),
        pytest.param("metadata-store:zk:h/c1/ledgers", "/c1/ledgers/ledgers", id="a deeper one"),
        pytest.param("metadata-store:zk:h/c1", "", id="a chroot"),
        pytest.param("metadata-store:zk:h", "", id="no path"),
        pytest.param("zk://h/ledgers", "", id="not of Pulsar"),
    ],
)
def test_pulsars_root_is_kept_if_it_is_another_one(written: str, pulsar_root: str) -> None:
    assert MetadataUri.parse(written).pulsar_root == pulsar_root


@pytest.mark.parametrize(
    "written",
    [
        "zk://h1:2181,h2/a/b",
        "zk+flat://h/ledgers",
        "zk+legacyhierarchical://h/ledgers",
        "metadata-store:zk:h1,[::1]:2181/c1/ledgers",
        "metadata-store:zk:h/c1",
    ],
)
def test_a_uri_as_text_means_the_same(written: str) -> None:
    uri = MetadataUri.parse(written)

    assert MetadataUri.parse(str(uri)) == uri


@pytest.mark.parametrize(
    ("written", "store"),
    [
        ("metadata-store:oxia://h:6648/default", "oxia"),
        ("metadata-store:etcd:http://h:2379", "etcd"),
        ("metadata-store:rocksdb:///data", "rocksdb"),
        ("metadata-store:rocksdb:/data", "rocksdb"),
        ("metadata-store:memory:local", "memory"),
        ("oxia:h:6648", "oxia"),
        ("rocksdb:/data", "rocksdb"),
        ("memory:local", "memory"),
        ("'etcd:http://h:2379'", "etcd"),
        ("ETCD+hierarchical://h:2379/ledgers", "etcd"),
    ],
)
def test_another_metadata_store_is_named_as_unsupported(written: str, store: str) -> None:
    with pytest.raises(SettingsError, match=f"metadata store {store} is not supported, only Zoo"):
        MetadataUri.parse(written)


@pytest.mark.parametrize(
    ("written", "what"),
    [
        pytest.param("metadata-store:", "'' is not a host", id="nothing"),
        pytest.param("metadata-store:zk:/ledgers", "'' is not a host", id="no host"),
        pytest.param(
            "metadata-store:zk:h:0/ledgers", "the port of 'h:0' is not between", id="port 0"
        ),
        pytest.param("metadata-store:zk:h/a//b", "ledgers root", id="an empty name"),
        pytest.param("metadata-store:zk:h/a/../b", "ledgers root", id="a relative name"),
        pytest.param("metadata-store:nosuch:h:1/ledgers", "'nosuch:h:1'", id="an unknown store"),
        pytest.param("zk:h:2181/ledgers", "metadata-store:zk:", id="a broker's metadataStoreUrl"),
        pytest.param("'zk://h/ledgers", "it must begin with zk://", id="a single quote"),
    ],
)
def test_a_wrong_uri_is_shown_as_it_was_written(written: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what) as raised:
        MetadataUri.parse(written)

    assert raised.value.context["uri"] == written
