"""The routes by which a running server takes new weights: a version begins, its tensors come or are pulled, and it is taken between two
steps.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ztk.core.runtime.comm.pulls import SCHEME
from ztk.inference import Generator
from ztk.serve.http import received
from ztk.serve.loop import EngineLoop, OnUpdate, Update
from ztk.serve.values import BadRequest, choice, parsed, shown
from ztk.serve.weights import Incoming

_T = TypeVar("_T")
_VERSION = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WRITTEN = 1 << 22  # bytes that are written to the disk at a time
_ON_UPDATE = tuple(one.value for one in OnUpdate)


class WeightRoutes:
    """Routes for one model. in_thread: calls a function in a thread. Requests have been authorised."""

    def __init__(
        self,
        incoming: Incoming,
        *,
        generator: Generator,
        loop: EngineLoop,
        most: int,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        """most: bytes of a JSON body."""
        self._incoming, self._generator, self._loop, self._most = incoming, generator, loop, most
        self._in_thread, self._turn, self._on_update = in_thread, asyncio.Lock(), OnUpdate.finish

    async def state(self, request: Request) -> Response:
        """The version, the parameters that a version has, and the ranks that divide the model."""
        shapes = {name: list(own.shape) for name, own in self._incoming.expected.parameters.items()}
        found = {"version": self._generator.version, "parameters": shapes, "ranks": self._generator.ranks}
        return JSONResponse(found)

    async def begin(self, request: Request) -> Response:
        """Begins a version, or takes one whose files lie in a folder or whose tensors another process offers."""
        body = parsed(await received(request, most=self._most))
        version, path, offer = _version(body.get("version")), body.get("path"), body.get("offer")
        on_update = OnUpdate(choice(body, name="on_update", of=_ON_UPDATE))
        if path is not None and not isinstance(path, str):
            raise BadRequest("path must be a text", param="path")
        if offer is not None and not (isinstance(offer, str) and offer.startswith(SCHEME)):
            raise BadRequest(f"offer must be an address that begins with {SCHEME}", param="offer")
        async with self._turn:
            if offer is not None:
                return await self._taken(offer, version=version, on_update=on_update)
            if path is not None:
                folder = await self._in_thread(self._incoming.named, path)
                return await self._taken(folder, version=version, on_update=on_update)
            await self._in_thread(self._incoming.begin, version)
            self._on_update = on_update
        return JSONResponse({"version": version})

    async def part(self, request: Request) -> Response:
        """Tensors of the version that has begun. Nothing of a part counts whose connection ends early."""
        version = _version(request.path_params["version"])
        async with self._turn:
            path = await self._in_thread(self._incoming.new_file, version)
        try:
            await self._write(request, path=path)
            async with self._turn:
                await self._in_thread(self._incoming.add, path, version=version)
        finally:
            path.unlink(missing_ok=True)
        return JSONResponse({"version": version})

    async def commit(self, request: Request) -> Response:
        """Takes the version that has begun."""
        version = _version(request.path_params["version"])
        async with self._turn:
            self._incoming.check(version)
            folder = await self._in_thread(lambda: self._incoming.folder)
            try:
                return await self._taken(folder, version=version, on_update=self._on_update)
            finally:
                await self._in_thread(self._incoming.drop)

    async def _write(self, request: Request, *, path: Path) -> None:
        size, held, most = 0, bytearray(), self._incoming.expected.nbytes
        with path.open("wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise BadRequest(f"a part has more than the {most} bytes of all parameters in fp32", status=413)
                held += chunk
                if len(held) >= _WRITTEN:
                    await self._in_thread(file.write, held)
                    held = bytearray()
            await self._in_thread(file.write, held)

    async def _taken(self, source: str, *, version: str, on_update: OnUpdate) -> Response:
        """Waits until the engine computes with the weights of a folder, or of an offer."""
        started, sizes = time.perf_counter(), list[int]()
        update = Update(
            prepare=lambda: self._generator.prepare(source),
            take=lambda: sizes.append(self._generator.switch(source, version=version)),
            on_update=on_update,
        )
        try:
            self._loop.update(update)
        except RuntimeError as error:
            raise BadRequest(str(error), status=503) from None
        try:
            await asyncio.shield(asyncio.wrap_future(update.done))
        except ValueError as error:
            raise BadRequest(f"the old weights stay: {error}") from error
        except ConnectionError as error:
            raise BadRequest(f"the old weights stay: {error}", status=503) from error
        return JSONResponse({"version": version, "seconds": time.perf_counter() - started, "bytes": sum(sizes)})


def weight_routes(routes: WeightRoutes | None, *, authorise: Callable[[Request], None]) -> list[Route]:
    """The routes, which answer 404 without `routes`. authorise: raises BadRequest for a request without the key."""

    def of(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            authorise(request)
            if routes is None:
                raise BadRequest("this server takes no weights: start it with serve.weights_path=FOLDER", status=404)
            return await getattr(routes, name)(request)

        return answer

    return [
        Route("/v1/weights", of("state")),
        Route("/v1/weights", of("begin"), methods=["POST"]),
        Route("/v1/weights/{version}", of("part"), methods=["PUT"]),
        Route("/v1/weights/{version}", of("commit"), methods=["POST"]),
    ]


def _version(value: object) -> str:
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise BadRequest(f"version={shown(value)}: must be 1 to 64 letters, digits, dots and dashes", param="version")
    return value
