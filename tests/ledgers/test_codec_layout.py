"""Paths of ledgers, layouts and metadata service URIs, compared with Java's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.codec.layout import Layout, MetadataUri, parse_layout, serialize_layout
from ledgers.errors import CorruptionError, SettingsError
from tests.vectors import Case, cases

ROOT = "/ledgers"
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name)


@pytest.mark.parametrize("case", cases("paths"), ids=lambda case: str(case["ledger_id"]))
@LAYOUTS
def test_a_ledger_has_javas_path(layout: Layout, case: Case) -> None:
    ledger_id, path = case["ledger_id"], case[layout.name.lower()]

    if path is None:
        with pytest.raises(SettingsError, match="ledger ids of this layout"):
            layout.path(ROOT, ledger_id)
    else:
        assert layout.path(ROOT, ledger_id) == path
        assert layout.ledger_id(ROOT, path) == ledger_id


@LAYOUTS
@given(data=st.data())
def test_a_ledger_id_follows_from_its_path(layout: Layout, data: st.DataObject) -> None:
    ledger_id = data.draw(st.integers(0, layout.ledger_id_stop - 1))
    root = data.draw(st.sampled_from(["/ledgers", "/a/L0000000001", "/00/0000"]))

    path = layout.path(root, ledger_id)

    assert layout.ledger_id(root, path) == ledger_id
    assert not layout.is_parent(root, path)
    parent = path.rpartition("/")[0]
    while parent != root:
        assert layout.is_parent(root, parent)
        assert layout.ledger_id(root, parent) is None
        parent = parent.rpartition("/")[0]
    assert layout.is_parent(root, root)


@LAYOUTS
@given(data=st.data())
def test_a_root_directorys_ids_have_paths_that_start_with_it(
    layout: Layout, data: st.DataObject
) -> None:
    bounds = [bound for bound in NEAR_BOUNDS if bound < layout.ledger_id_stop]
    ids = st.integers(0, layout.ledger_id_stop - 1) | st.sampled_from(bounds)
    ledger_id, other_id = data.draw(st.tuples(ids, ids))

    tree = tree_of(layout, ledger_id)

    assert (other_id in layout.ids_below(ROOT, tree)) == (tree_of(layout, other_id) == tree)
    assert other_id in layout.ids_below(ROOT, ROOT)


def test_the_last_short_directory_ends_where_long_paths_begin() -> None:
    layout = Layout.HIERARCHICAL

    assert layout.ids_below(ROOT, f"{ROOT}/21") == range(21 * 10**8, 2**31 - 1)
    assert layout.ids_below(ROOT, f"{ROOT}/000") == range(2**31 - 1, 10**16)


NEAR_BOUNDS = [0, 10**8 - 1, 10**8, 2**31 - 2, 2**31 - 1, 10**16 - 1, 10**16, 2**63 - 1]


def tree_of(layout: Layout, ledger_id: int) -> str:
    """Return the topmost directory above the ledger below the root; for a flat layout the root."""
    name = layout.path(ROOT, ledger_id).removeprefix(f"{ROOT}/")
    return ROOT if layout is Layout.FLAT else f"{ROOT}/{name.split('/')[0]}"


@pytest.mark.parametrize("case", cases("root_children"), ids=lambda case: case["child_of_root"])
@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout.FLAT, "flat_parent"),
        (Layout.LEGACY_HIERARCHICAL, "legacy_parent"),
        (Layout.HIERARCHICAL, "hierarchical_parent"),
        (Layout.LONG_HIERARCHICAL, "long_parent"),
    ],
)
def test_the_walk_follows_the_children_that_java_follows(
    layout: Layout, field: str, case: Case
) -> None:
    path = f"{ROOT}/{case['child_of_root']}"

    leads_to_ledgers = layout.is_parent(ROOT, path) or layout.ledger_id(ROOT, path) is not None

    assert leads_to_ledgers is case[field]


@pytest.mark.parametrize(
    ("layout", "path"),
    [
        pytest.param(Layout.HIERARCHICAL, "/other/00/0000/L0001", id="another root"),
        pytest.param(Layout.HIERARCHICAL, "/ledgers", id="the root"),
        pytest.param(Layout.HIERARCHICAL, "/ledgersx/00/0000/L0001", id="root is only a prefix"),
        pytest.param(Layout.HIERARCHICAL, "/ledgers/00/0000/L00001", id="a digit too many"),
        pytest.param(Layout.HIERARCHICAL, "/ledgers/00/0000/L0001/x", id="below a ledger"),
        pytest.param(
            Layout.HIERARCHICAL, "/ledgers/00/0000/L０００1", id="digits of another script"
        ),
        pytest.param(Layout.HIERARCHICAL, "/ledgers/00/0000/L0001\n", id="a line feed behind"),
        pytest.param(Layout.HIERARCHICAL, "/ledgers/L0000000001", id="of the flat layout"),
        pytest.param(
            Layout.HIERARCHICAL,
            "/ledgers/000/0000/0000/0000/L0001",
            id="a short id in the long subtree",
        ),
        pytest.param(
            Layout.HIERARCHICAL, "/ledgers/21/4748/L3647", id="a long id in the short subtree"
        ),
        pytest.param(
            Layout.LONG_HIERARCHICAL, "/ledgers/922/3372/0368/5477/L5808", id="2^63 is no ledger id"
        ),
        pytest.param(Layout.FLAT, "/ledgers/L9999999999", id="beyond the range of the layout"),
    ],
)
def test_a_path_elsewhere_is_no_ledger(layout: Layout, path: str) -> None:
    assert layout.ledger_id(ROOT, path) is None


def test_the_ledgers_of_a_directory_are_recognised() -> None:
    names = ["L0007", "notes", "L0002", "L00020", "0003"]

    ledger_ids, others = Layout.HIERARCHICAL.ledgers_among(ROOT, f"{ROOT}/00/0001", names)

    assert (ledger_ids, others) == ([10_007, 10_002], ["notes", "L00020", "0003"])


@pytest.mark.parametrize("directory", [ROOT, f"{ROOT}/00", "/other/00/0001"])
def test_no_ledger_is_in_a_directory_of_another_kind(directory: str) -> None:
    assert Layout.HIERARCHICAL.ledgers_among(ROOT, directory, ["L0007"]) == ([], ["L0007"])


@given(path=st.text(alphabet="/L0123456789x", max_size=40))
@LAYOUTS
def test_any_name_is_answered(layout: Layout, path: str) -> None:
    ledger_id = layout.ledger_id(ROOT, f"{ROOT}/{path}")

    assert ledger_id is None or layout.path(ROOT, ledger_id) == f"{ROOT}/{path}"


@pytest.mark.parametrize("ledger_id", [-1, 2**63])
@LAYOUTS
def test_ids_beyond_64_bits_have_no_path(layout: Layout, ledger_id: int) -> None:
    with pytest.raises(SettingsError):
        layout.path(ROOT, ledger_id)


# --- LAYOUT ---------------------------------------------------------------------------------------

LAYOUT_CASES = [case for case in cases("znode_payloads") if case["kind"] == "layout"]


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case["fields"]["factory_class"])
def test_layout_content_is_read_and_written_as_java_does(case: Case) -> None:
    data = bytes.fromhex(case["data"])

    layout = parse_layout(data)

    assert case["fields"]["factory_class"].endswith(f".{layout.value}")
    assert serialize_layout(layout) == data


@LAYOUTS
def test_every_layout_survives_its_znode(layout: Layout) -> None:
    assert parse_layout(serialize_layout(layout)) is layout


@pytest.mark.parametrize(
    ("data", "layout"),
    [
        pytest.param(b"1\nflat:1", Layout.FLAT, id="the first format, flat"),
        pytest.param(b"1\nhierarchical:1", Layout.HIERARCHICAL, id="the first format"),
        pytest.param(
            b"2\nshaded.org.apache.bookkeeper.meta.LegacyHierarchicalLedgerManagerFactory:1",
            Layout.LEGACY_HIERARCHICAL,
            id="a relocated class",
        ),
        pytest.param(b"1\nflat:1\n", Layout.FLAT, id="a line feed behind, as of an editor"),
        pytest.param(b"1\nflat:1\nmore\n", Layout.FLAT, id="a third line"),
        pytest.param(
            b"2\norg.apache.pulsar.metadata.bookkeeper.PulsarLedgerManagerFactory:1",
            Layout.HIERARCHICAL,
            id="Pulsar's metadata driver",
        ),
    ],
)
def test_older_and_relocated_names_are_known(data: bytes, layout: Layout) -> None:
    assert parse_layout(data) is layout


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b"", CorruptionError, id="empty"),
        pytest.param(b"2", CorruptionError, id="no line feed"),
        pytest.param(b"2\nflat", CorruptionError, id="no version"),
        pytest.param(b"2\nflat:one", CorruptionError, id="version is no number"),
        pytest.param(b"2\nflat:1\r\n", CorruptionError, id="a carriage return, as in Java"),
        pytest.param(b"\xff\n\xff:1", CorruptionError, id="no text"),
        pytest.param(
            b"3\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:1",
            SettingsError,
            id="a later format",
        ),
        pytest.param(
            b"2\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:2",
            SettingsError,
            id="a later version",
        ),
        pytest.param(b"1\nms:1", SettingsError, id="the first format, not in ZooKeeper"),
        pytest.param(
            b"2\norg.apache.bookkeeper.meta.MSLedgerManagerFactory:1",
            SettingsError,
            id="not in ZooKeeper",
        ),
        pytest.param(
            b"2\ncom.example.HierarchicalLedgerManagerFactory:1",
            SettingsError,
            id="not BookKeeper's",
        ),
    ],
)
def test_unknown_content_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="LAYOUT"):
        parse_layout(data)


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: b"2\n" + tail))
def test_garbage_is_refused_in_the_documented_way(data: bytes) -> None:
    with pytest.raises((CorruptionError, SettingsError)):
        parse_layout(data)


# --- the URI --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        pytest.param(
            "zk+hierarchical://h1:2181;h2:2181/ledgers",
            MetadataUri(hosts="h1:2181,h2:2181", root="/ledgers", layout=Layout.HIERARCHICAL),
            id="as BookKeeper documents it",
        ),
        pytest.param(
            "zk://h1:2181/ledgers",
            MetadataUri(hosts="h1:2181", root="/ledgers"),
            id="without a layout, LAYOUT decides",
        ),
        pytest.param(
            "zk+null://h1:2181,h2/a/b-c/",
            MetadataUri(hosts="h1:2181,h2", root="/a/b-c"),
            id="commas, no port, a deeper root",
        ),
        pytest.param(
            "ZK+LongHierarchical://[::1]:2181/ledgers",
            MetadataUri(hosts="[::1]:2181", root="/ledgers", layout=Layout.LONG_HIERARCHICAL),
            id="case of the scheme, an IPv6 address",
        ),
        pytest.param(
            "zk+flat://h1/ledgers",
            MetadataUri(hosts="h1", root="/ledgers", layout=Layout.FLAT),
            id="flat",
        ),
    ],
)
def test_a_uri_names_hosts_root_and_layout(uri: str, expected: MetadataUri) -> None:
    assert MetadataUri.parse(uri) == expected


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        pytest.param("", "begin with zk://", id="empty"),
        pytest.param("h1:2181/ledgers", "begin with zk://", id="no scheme"),
        pytest.param("etcd://h1:2379/ledgers", "is not supported", id="another store"),
        pytest.param("zkk://h1/ledgers", "begin with zk://", id="only a prefix"),
        pytest.param("zk+ms://h1/ledgers", "layout must be one of", id="not in ZooKeeper"),
        pytest.param("zk+://h1/ledgers", "layout must be one of", id="plus without a layout"),
        pytest.param("zk+flat+null://h1/ledgers", "layout must be one of", id="two layouts"),
        pytest.param("zk:///ledgers", "not a host", id="no host"),
        pytest.param("zk://h1;;h2/ledgers", "not a host", id="an empty host"),
        pytest.param("zk://h1:0/ledgers", "port of .* is not between 1 and 65535", id="port 0"),
        pytest.param(
            "zk://h1:65536/ledgers", "port of .* is not between 1 and 65535", id="port too large"
        ),
        pytest.param("zk://h1:x/ledgers", "not a host", id="port is no number"),
        pytest.param("zk://user@h1/ledgers", "not a host", id="a user"),
        pytest.param("zk://h1:2181", "ledgers root", id="no path"),
        pytest.param("zk://h1:2181/", "ledgers root", id="an empty path"),
        pytest.param("zk://h1:2181/a//b", "ledgers root", id="an empty name"),
        pytest.param("zk://h1:2181/a/../b", "ledgers root", id="a relative name"),
        pytest.param("zk://h1:2181/ledgers?x=1", "ledgers root", id="a query"),
        pytest.param("zk://h1:2181/ledgers#x", "ledgers root", id="a fragment"),
        pytest.param("zk://h1:2181/led gers", "ledgers root", id="a blank"),
    ],
)
def test_the_error_of_a_wrong_uri_names_what_is_allowed(uri: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what) as raised:
        MetadataUri.parse(uri)

    assert "zk+hierarchical://host1:2181;host2:2181/ledgers" in str(raised.value)


@given(st.text(max_size=60) | st.text(max_size=40).map(lambda tail: f"zk://{tail}"))
def test_any_text_is_a_uri_or_a_settings_error(uri: str) -> None:
    try:
        parsed = MetadataUri.parse(uri)
    except SettingsError:
        return
    assert parsed.root.startswith("/")
    assert parsed.hosts
