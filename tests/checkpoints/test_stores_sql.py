"""What only databases do: addresses, refusals, the size of the file, calls that are cancelled."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from checkpoints.receipts import ReceiptRange, compact
from checkpoints.stores.sql import SqlClientTable, SqlReceiptStore
from ledgers.errors import BookmenderError, RejectedError, SettingsError, UnavailableError
from tests.checkpoints.stores import receipts
from tests.ledgers.scripted_bookie import in_loop


@pytest.mark.parametrize(
    ("url", "client", "error"),
    [
        pytest.param("feed.db", "a", SettingsError, id="no URL"),
        pytest.param("mysql://localhost/feed", "a", SettingsError, id="another database"),
        pytest.param("sqlite://", "a", SettingsError, id="SQLite in memory"),
        pytest.param("sqlite:feed.db", "a", SettingsError, id="no slashes"),
        pytest.param(
            "sqlite://host/feed.db", "a", SettingsError, id="two slashes in place of three"
        ),
        pytest.param("postgresql:///feed", "a", SettingsError, id="no user"),
        pytest.param("sqlite:///{folder}/none/feed.db", "a", UnavailableError, id="no folder"),
        pytest.param("sqlite:///{folder}/feed.db", "", SettingsError, id="no name"),
        pytest.param("sqlite:///{folder}/feed.db", "a" * 201, SettingsError, id="a long name"),
        pytest.param("sqlite:///{folder}/feed.db", "\udcff", SettingsError, id="not UTF-8"),
        pytest.param(
            "postgresql://a:b@127.0.0.1:1/feed", "a", UnavailableError, id="nobody listens"
        ),
        pytest.param("postgresql://a:x@b:c@d/feed", "a", SettingsError, id="no port"),
        pytest.param("postgresql+no://a:b@d/feed", "a", SettingsError, id="no such driver"),
        pytest.param("postgresql+psycopg2://a@d/feed", "a", SettingsError, id="missing driver"),
    ],
)
def test_a_store_that_cannot_be_opened(
    url: str, client: str, error: type[BookmenderError], tmp_path: Path
) -> None:
    with pytest.raises(error):
        asyncio.run(SqlReceiptStore.open(url.format(folder=tmp_path), client=client))


def test_wrong_passwords_are_no_answer_of_another_kind(postgresql: str) -> None:
    url = postgresql.replace("tester:", "nobody:")

    with pytest.raises((UnavailableError, RejectedError)):
        asyncio.run(SqlReceiptStore.open(url, client="a"))


def test_what_postgresql_says_is_quoted_alone(postgresql: str) -> None:
    url = make_url(postgresql).set(database="missing").render_as_string(hide_password=False)

    with pytest.raises(RejectedError) as refused:
        asyncio.run(SqlReceiptStore.open(url, client="a"))

    assert refused.value.context == {"error": 'database "missing" does not exist'}


@pytest.mark.parametrize(
    "url",
    ["postgresql://a:hunter2@127.0.0.1:1/feed", "postgresql://a@127.0.0.1:1/feed?password=hunter2"],
)
def test_an_error_names_the_database_without_its_password(url: str) -> None:
    with pytest.raises(UnavailableError) as failed:
        asyncio.run(SqlReceiptStore.open(url, client="a"))

    assert "hunter2" not in "".join(traceback.format_exception(failed.value))
    assert "127.0.0.1:1/feed" in str(failed.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://a:hunter2@127.0.0.1:port/feed", "not a URL"),
        ("postgresql+none://a:hunter2@127.0.0.1:1/feed", "cannot be loaded"),
        ("postgresql://a:hunter2@127.0.0.1:1/feed?sslmode=hunter2", "'sslmode'"),
    ],
)
def test_a_url_that_cannot_be_used_is_a_wrong_setting(url: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as failed:
        asyncio.run(SqlReceiptStore.open(url, client="a"))

    assert "hunter2" not in "".join(traceback.format_exception(failed.value))


def test_an_operator_who_looks_creates_no_file(tmp_path: Path) -> None:
    file = tmp_path / "feed.db"

    with pytest.raises(SettingsError, match="the file does not exist"):
        asyncio.run(SqlClientTable.open(f"sqlite:///{file}"))

    assert not file.exists()


def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "feed.db").write_bytes(b"not a database at all" * 100)

    with pytest.raises(BookmenderError, match="not a database"):
        asyncio.run(SqlReceiptStore.open(f"sqlite:///{tmp_path / 'feed.db'}", client="a"))


@in_loop
async def test_a_file_in_use_is_unavailable_and_then_works(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'feed.db'}?timeout=0.05"

    store = await SqlReceiptStore.open(url, client="a")
    other = create_engine(url)
    with other.connect() as connection:
        connection.execute(text("BEGIN IMMEDIATE"))
        with pytest.raises(UnavailableError, match="locked"):
            await store.store_low_watermark(5)
        assert await store.get_low_watermark() is None  # reading goes on
    other.dispose()
    await store.store_low_watermark(5)
    assert await store.get_low_watermark() == 5
    await store.close()


@in_loop
async def test_a_cancelled_call_breaks_nothing(tmp_path: Path) -> None:
    store = await SqlReceiptStore.open(f"sqlite:///{tmp_path / 'feed.db'}", client="a")
    for number in range(20):
        writing = asyncio.ensure_future(store.store_low_watermark(number))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    await store.store_low_watermark(100)
    assert await store.get_low_watermark() == 100
    await store.close()
    await store.close()


def test_the_file_is_small_after_many_receipts(tmp_path: Path) -> None:
    path = tmp_path / "feed.db"

    async def main() -> None:
        store = await SqlReceiptStore.open(f"sqlite:///{path}", client="catalogue")
        await store.store_low_watermark(0)
        every_second = [ReceiptRange(begin, begin) for begin in range(3, 40_000, 2)]
        others = [ReceiptRange(begin, begin) for begin in range(2, 40_000, 2)]
        await store.store_checkpoint_range_receipts(every_second)
        await store.store_checkpoint_range_receipts(others)
        await compact(store)
        assert await receipts(store) == [(2, 39_999)]
        await store.close()

    asyncio.run(main())

    assert path.stat().st_size < 10_000
