"""Request and response bodies: received up to a limit, and sent in OpenAI's format."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

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


def refused(error: ValueError) -> JSONResponse:
    """Returns a response with status 400, or the status of a `BadRequest`."""
    known = error if isinstance(error, BadRequest) else BadRequest(str(error))
    return failure(known.status, message=str(known), param=known.param, code=known.code, headers=known.headers)


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


def failure(
    status: int,
    *,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Returns OpenAI's error body."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": param, "code": code}
    return _Json({"error": body}, status_code=status, headers=headers)


class _Json(JSONResponse):
    """ASCII only, because a message may contain characters of a request that UTF-8 cannot represent."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()
