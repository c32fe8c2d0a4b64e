"""The files of the page: who may open the page, and what the server sends."""

import base64
import re
from importlib.resources import files
from pathlib import Path

import pytest
from aiohttp import ClientResponse

from daemon.http.access import password_as_token
from tests.daemon.http.serving import TOKEN, Client, over_http

ROOT = Path(__file__).parents[3]
FILES = ("page.html", "page.css", "page.js")


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"x:{password}".encode()).decode()}


@over_http()
async def test_the_page_allows_no_code_but_its_own(client: Client) -> None:
    response = await client.get("/")
    text = await response.text()

    assert (response.status, response.content_type) == (200, "text/html")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?! src=\"page\.js\")|<style|\sstyle=|\son\w+=", text)
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        assert f'"{name}"' in text
        found = await client.get(f"/{name}")
        assert (found.status, found.content_type) == (200, kind)


@over_http()
async def test_what_a_browser_has_already_is_not_sent_again(client: Client) -> None:
    for path in ("/", "/page.js", "/api/v1/bookies"):
        tag = (await client.get(path)).headers["ETag"]
        again = await client.get(path, headers={"If-None-Match": tag})
        assert (again.status, again.headers["ETag"]) == (304, tag)
        assert (await client.get(path, headers={"If-None-Match": '"other"'})).status == 200
        assert again.headers["Cache-Control"] == ("no-store" if "api" in path else "no-cache")


@over_http()
async def test_a_page_of_another_host_is_refused(client: Client) -> None:
    assert (await client.get("/", headers={"Host": "evil.example"})).status == 403


@over_http(has_token=True, address="0.0.0.0")
async def test_from_elsewhere_the_browser_asks_for_the_token(client: Client) -> None:
    async def get(path: str, password: str | None = None) -> ClientResponse:
        given = {} if password is None else basic(password)
        return await client.get(path, headers={"X-Forwarded-For": "10.0.0.9", **given})

    refused = await get("/")
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"].startswith("Basic ")
    for path in ("/", "/api/v1/node"):
        assert (await get(path, "a-wrong-token-of-length")).status == 401
        assert (await get(path, TOKEN)).status == 200
    # The script must not make the browser ask, while it polls.
    assert not (await get("/api/v1/node")).headers["WWW-Authenticate"].startswith("Basic")


@over_http(has_token=True)
async def test_a_password_of_the_browser_changes_nothing(client: Client) -> None:
    """A browser sends it with requests of other pages as well."""
    response = await client.post("/api/v1/disable", headers=basic(TOKEN))
    assert response.status == 401


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer x", "Bearer x"),
        ("", ""),
        ("Basic eDp5OnE=", "Bearer y:q"),
        ("basic eDp5", "Bearer y"),
        ("Basic %%", ""),
        ("Basic /w==", ""),
        ("Basic é", ""),
    ],
)
def test_a_password_is_read_as_the_token(header: str, expected: str) -> None:
    assert password_as_token(header) == expected


def test_the_files_name_no_other_host() -> None:
    for name in FILES:
        text = files("daemon.http").joinpath(name).read_text()
        text = re.sub("http://www.w3.org/", "", text)  # namespaces
        assert not re.search(r"https?:|url\(|@import|import\(|eval\(", text)
