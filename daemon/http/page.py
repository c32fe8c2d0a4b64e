"""Serves the page for people: static files, whose script reads the API below ``api/v1``.

The page itself contains no data of the cluster. It needs the same access as the API, so that a
browser asks for the token when it opens the page. Style and script need none.
"""

from functools import cache
from hashlib import blake2b
from importlib.resources import files

from aiohttp import web

from daemon.http.access import Access, Refusal, is_from_this_host, password_as_token
from daemon.http.tls import has_certificate

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time, and be told 304
}
ASK_PASSWORD = {"WWW-Authenticate": 'Basic realm="bookmender: the password is the token"'}


class Page:
    """The routes of the page."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def add_to(self, app: web.Application) -> None:
        for path in FILES:
            _content(path)
            app.router.add_get(path, self._file)

    async def _file(self, request: web.Request) -> web.Response:
        if request.path == "/":
            try:
                self._access.check_host(request.headers.get("Host", ""))
                authorization = password_as_token(request.headers.get("Authorization", ""))
                await self._access.refresh(authorization)
                self._access.check_read(
                    authorization,
                    has_certificate=has_certificate(request),
                    is_here=is_from_this_host(request.remote or "", request.headers),
                )
            except Refusal as refusal:
                headers = HEADERS | (ASK_PASSWORD if refusal.status == 401 else {})
                return web.Response(text=f"{refusal}\n", status=refusal.status, headers=headers)
        _, kind = FILES[request.path]
        response = web.Response(
            body=_content(request.path), content_type=kind, charset="utf-8", headers=HEADERS
        )
        return unless_known(request, response)


@cache  # the disk may hang later
def _content(path: str) -> bytes:
    return files("daemon.http").joinpath(FILES[path][0]).read_bytes()


def unless_known(request: web.Request, response: web.Response) -> web.Response:
    """Return the response with an ETag, or 304 without a body if the client has this answer."""
    if response.status != 200 or not isinstance(response.body, bytes):
        return response
    response.etag = blake2b(response.body, digest_size=12).hexdigest()
    if any(response.etag == known for known in request.if_none_match or ()):
        kept = {name: text for name, text in response.headers.items() if name != "Content-Type"}
        return web.Response(status=304, headers=kept)
    return response
