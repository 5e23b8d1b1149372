"""Rejects requests from foreign web pages if no key protects the server.

A page of another site can send requests to a server on its reader's machine. Its name is then in Origin or, if it resolves its own name
to that machine (DNS rebinding), in Host.
"""

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ztk.serve.http import failure


class Guard:
    """An ASGI application that answers 403 for foreign names in Host and Origin.

    hosts: further names of this server. origins: web pages that may send requests; "*" allows all. Browsers always send Host; clients
    without it are allowed.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app, self._origins = app, frozenset(origins)
        own = {"localhost", socket.gethostname(), socket.getfqdn(), *hosts}
        self._hosts = frozenset(name.lower() for name in own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := self._fault(Headers(scope=scope))) is not None:
            await failure(403, message=reason)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_name(f"//{host}")):
            return (
                f"Host: {host[:80]} is no name of this server: use its address, start it with serve.allowed_hosts=[NAME], or with "
                "serve.api_key_variable=NAME"
            )
        if origin is None or origin in self._origins or "*" in self._origins or _place(origin) == host.lower():
            return None
        return f"Origin: {origin[:80]} may not send requests: start the server with serve.cors_origins=[ORIGIN]"

    def _is_own(self, name: str) -> bool:
        """Returns whether a name belongs to this server. IP addresses do, because a page cannot rebind them."""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts or name.endswith(".localhost")
        return True


def _place(origin: str) -> str:
    """Returns name and port of a web page's origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(address: str) -> str:
    """Returns the address without its port."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
