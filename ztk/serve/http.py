"""Requests and responses without their meaning: bodies up to a limit, errors in OpenAI's format, streams, and foreign web pages."""

import ipaddress
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ztk.serve.loop import Outbox
from ztk.serve.values import BadRequest

_DISCARDED = 16  # a body up to this multiple of the limit is read and dropped, so that its sender receives the error


async def received(request: Request, *, most: int) -> bytes:
    """Returns the body. Raises BadRequest for a longer one, after dropping its rest, and ClientDisconnect."""
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
            continue
        parts.clear()
        if size > _DISCARDED * most:
            break
    if size > most:
        text = f"the body has more than {most} bytes: send less in one request, or start the server with serve.max_body_bytes=N"
        raise BadRequest(text, status=413)
    return b"".join(parts)


async def watch(request: Request, *, outbox: Outbox) -> None:
    """Waits until the client disconnects, then marks its outbox."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    outbox.leave()


def authorise(request: Request, *, key: str | None) -> None:
    """Raises BadRequest for a request without the key, if there is one."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if key is None or (scheme.lower() == "bearer" and secrets.compare_digest(sent.strip().encode(), key.encode())):
        return
    text = "Incorrect API key: send it as Authorization: Bearer KEY"
    raise BadRequest(text, status=401, code="invalid_api_key")


class Stream(StreamingResponse):
    """Server-sent events. on_end: always called, even if the client disconnects before the first event: a generator that has not started
    runs no cleanup.
    """

    def __init__(self, events: AsyncIterator[bytes], *, on_end: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"} | headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def failure(error: BadRequest) -> Response:
    """Returns the response to a failed request."""
    # ASCII only, because a message may contain characters of a request that UTF-8 cannot represent.
    text = json.dumps(error.body())
    return Response(text, status_code=error.status, headers=error.headers, media_type="application/json")


class Guard:
    """An ASGI application that answers 403 for foreign names in Host and Origin, for a server that no key protects.

    A page of another site can send requests to a server on its reader's machine. Its name is then in Origin or, if it resolves its own name
    to that machine (DNS rebinding), in Host.

    hosts: further names of this server. origins: web pages that may send requests; "*" allows all. Browsers always send Host; clients
    without it are allowed.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app, self._origins = app, frozenset(origins)
        own = {"localhost", socket.gethostname(), socket.getfqdn(), *hosts}
        self._hosts = frozenset(name.lower() for name in own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := self._fault(Headers(scope=scope))) is not None:
            await failure(BadRequest(reason, status=403))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_split(f"//{host}").hostname or ""):
            return (
                f"Host: {host[:80]} is no name of this server: use its address, start it with serve.allowed_hosts=[NAME], or with "
                "serve.api_key_variable=NAME"
            )
        if (
            origin is None
            or origin in self._origins
            or "*" in self._origins
            or _split(origin).netloc.lower() == host.lower()
        ):
            return None
        return f"Origin: {origin[:80]} may not send requests: start the server with serve.cors_origins=[ORIGIN]"

    def _is_own(self, name: str) -> bool:
        """Returns whether a name belongs to this server. IP addresses do, because a page cannot rebind them."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts or name.endswith(".localhost")
        return True


def _split(address: str) -> SplitResult:
    """Returns the parts of an address, which are empty for an invalid one."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")
