"""Who may read and change over HTTP."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from daemon.http.access import Access, Refusal, is_from_this_host, is_this_host
from daemon.settings import HttpSettings
from ledgers.errors import SettingsError

TOKEN = "0123456789abcdef"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


def access(*, observes: bool = False, **settings: object) -> Access:
    made = Access(HttpSettings(**settings), observes=observes)  # type: ignore[arg-type]
    asyncio.run(made.refresh("a header"))
    return made


def test_a_change_without_a_token_file_says_what_to_set() -> None:
    with pytest.raises(Refusal, match=r"Set http\.token_file") as refused:
        access().check_change(f"Bearer {TOKEN}")

    assert refused.value.status == 403


def test_a_token_on_a_disk_that_hangs_blocks_one_thread_and_no_loop(
    token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, threads, goes_on = access(token_file=token_file), [], threading.Event()

    def hang() -> None:
        threads.append(threading.current_thread())
        goes_on.wait()

    async def ask() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await ours.refresh("a header")

    async def ask_twice() -> None:
        await ask()
        await ask()
        goes_on.set()

    monkeypatch.setattr(ours, "read", hang)
    asyncio.run(ask_twice())

    assert len(threads) == 1


@pytest.mark.parametrize(
    ("header", "status"),
    [
        pytest.param("", 401, id="no token"),
        pytest.param(TOKEN, 401, id="without the scheme"),
        pytest.param(f"Basic {TOKEN}", 401, id="another scheme"),
        pytest.param("Bearer 0123456789abcdeF", 401, id="a wrong token"),
        pytest.param("Bearer ", 401, id="an empty token"),
        pytest.param(f"Bearer {TOKEN}é", 401, id="not ASCII"),
        pytest.param(f"Bearer {TOKEN}\udcff", 401, id="not UTF-8, as aiohttp decodes it"),
        pytest.param(f"bearer {TOKEN}", None, id="the scheme in lower case"),
        pytest.param(f"Bearer {TOKEN}", None, id="the token"),
    ],
)
def test_a_change_needs_the_token(token_file: str, header: str, status: int | None) -> None:
    if status is None:
        access(token_file=token_file).check_change(header)
        return
    with pytest.raises(Refusal) as refused:
        access(token_file=token_file).check_change(header)
    assert refused.value.status == status


def test_a_replaced_token_is_in_force_at_once(token_file: str) -> None:
    ours = access(token_file=token_file)
    Path(token_file).write_text("another-long-token-x")
    asyncio.run(ours.refresh("a header"))

    ours.check_change("Bearer another-long-token-x")
    with pytest.raises(Refusal):
        ours.check_change(f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"", "fewer than 16", id="empty"),
        pytest.param(b"short\n", "fewer than 16", id="short"),
        pytest.param(b"\xff" * 20, "not text.*Write a token", id="no text"),
        pytest.param(None, "No such file.*Write a token", id="missing"),
    ],
)
def test_a_useless_token_file_admits_nobody(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(Refusal, match=told) as refused:
        access(token_file=str(path)).check_change("Bearer ")

    assert refused.value.status == 403


def test_a_node_that_observes_changes_nothing(token_file: str) -> None:
    with pytest.raises(Refusal, match="only observes"):
        access(token_file=token_file, observes=True).check_change(f"Bearer {TOKEN}")


def test_reading_is_open_from_this_host_and_by_setting() -> None:
    access().check_read("", is_here=True)
    access(address="0.0.0.0").check_read("", is_here=True)
    access(address="0.0.0.0", open_reads=True).check_read("")


def test_reading_from_elsewhere_needs_the_token(token_file: str) -> None:
    guarded = access(token_file=token_file)

    guarded.check_read(f"Bearer {TOKEN}")
    with pytest.raises(Refusal, match="needs the token"):
        guarded.check_read("")
    with pytest.raises(Refusal, match=r"http\.open_reads"):
        access().check_read("")


@pytest.mark.parametrize(
    ("peer", "headers", "is_here"),
    [
        pytest.param("127.0.0.1", {"Host": "localhost:7318"}, True, id="ssh -L"),
        pytest.param("::1", {"Host": "[::1]:7318"}, True, id="IPv6"),
        pytest.param("::ffff:127.0.0.1", {"Host": "127.0.0.1"}, True, id="IPv4 on ::"),
        pytest.param("10.0.0.9", {"Host": "localhost:7318"}, False, id="another host"),
        pytest.param("", {"Host": "localhost:7318"}, False, id="an unknown peer"),
        pytest.param("127.0.0.1", {"Host": "evil.example"}, False, id="DNS rebinding"),
        pytest.param(
            "127.0.0.1", {"Host": "localhost", "x-Forwarded-for": "1.2.3.4"}, False, id="a proxy"
        ),
        pytest.param(
            "127.0.0.1", {"Host": "localhost", "Forwarded": "for=1.2.3.4"}, False, id="RFC 7239"
        ),
    ],
)
def test_this_host_is_who_connects_over_loopback_without_a_proxy(
    peer: str, headers: dict[str, str], is_here: bool
) -> None:
    assert is_from_this_host(peer, headers) is is_here


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:7318", True),
        ("127.0.0.1", True),
        ("localhost:7318", True),
        ("[::1]:7318", True),
        ("::1", True),
        ("", True),
        ("evil.example:7318", False),
        ("10.0.0.1:7318", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_the_host_header_must_name_this_host(host: str, is_ours: bool) -> None:
    assert is_this_host(host) is is_ours


def test_on_other_addresses_any_name_is_good() -> None:
    access(address="0.0.0.0").check_host("bookie-1.example:7318")
    with pytest.raises(Refusal):
        access().check_host("bookie-1.example:7318")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"port": -1}, id="a negative port"),
        pytest.param({"port": 70_000}, id="a port that is too high"),
        pytest.param({"address": "localhost"}, id="a name for an address"),
        pytest.param({"token_file": "token"}, id="a relative path"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        HttpSettings(**given)  # type: ignore[arg-type]
