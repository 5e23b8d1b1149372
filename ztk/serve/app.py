"""OpenAI's HTTP interface for a `Generator`, with routes that generate nothing: texts to tokens and back, and texts to vectors."""

import asyncio
import gc
import importlib.metadata
import logging
import secrets
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ztk.inference import Generator, SamplingParams
from ztk.serve.answers import Shape
from ztk.serve.bodies import Limits, header, read_body
from ztk.serve.http import Guard, Stream, authorise, failure, received, watch
from ztk.serve.loop import Busy, EngineLoop, Job, Outbox
from ztk.serve.models import Opened
from ztk.serve.replies import Reader, Reply
from ztk.serve.responses import ResponseReply, Stored, read_turn
from ztk.serve.tools import Format
from ztk.serve.updates import WeightRoutes, weight_routes
from ztk.serve.values import BadRequest, parsed, shown
from ztk.serve.weights import Incoming

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>ztk</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.1rem; } textarea { width: 100%; box-sizing: border-box; font: 14px/1.5 ui-monospace, monospace; }
form div { display: flex; flex-wrap: wrap; gap: 1rem; align-items: center; margin: .6rem 0; } input { width: 6rem; }
#answer { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.7 ui-monospace, monospace; border: 1px solid var(--line);
  border-radius: .4rem; min-height: 6rem; padding: .8rem; } #status { color: #888; } .error { color: #c33; }
</style></head><body>
<h1 id="model">ztk</h1>
<form><textarea id="prompt" rows="6" autofocus>def main():</textarea>
<div><label>tokens <input id="max_tokens" type="number" min="1" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" step="0.1" value="0.8"></label>
<label>key <input id="key" type="password" placeholder="if asked for"></label>
<button id="go">Generate</button><button id="stop" type="button" disabled>Stop</button><span id="status"></span></div></form>
<div id="answer" aria-live="polite"></div>
<p>The redder a token, the less likely it was; point at it for its probability and its rivals.</p>
<script>
const at = id => document.getElementById(id);
let control = null;
const headers = () => ({"Content-Type": "application/json", ...(at("key").value ? {Authorization: "Bearer " + at("key").value} : {})});
fetch("v1/models", {headers: headers()}).then(r => r.json()).then(m => { if (m.data) at("model").textContent = m.data[0].id; });
function show(choice) {
  if (!choice.text) return;
  const span = document.createElement("span"), p = choice.logprobs ? Math.exp(choice.logprobs.token_logprobs[0]) : 1;
  span.textContent = choice.text;
  span.style.background = `rgba(220, 40, 40, ${(0.6 * (1 - p)).toFixed(3)})`;
  const rivals = choice.logprobs ? Object.entries(choice.logprobs.top_logprobs[0]).sort((a, b) => b[1] - a[1]) : [];
  span.title = [`${(100 * p).toFixed(1)} %`, ...rivals.map(([t, v]) => `${JSON.stringify(t)} ${(100 * Math.exp(v)).toFixed(1)} %`)].join("\\n");
  at("answer").append(span);
}
async function run(event) {
  event.preventDefault();
  at("answer").textContent = ""; at("status").textContent = "..."; at("status").className = "";
  at("go").disabled = true; at("stop").disabled = false; control = new AbortController();
  const started = performance.now(); let count = 0;
  try {
    const body = {prompt: at("prompt").value, max_tokens: +at("max_tokens").value,
      temperature: +at("temperature").value, logprobs: 5, stream: true};
    const response = await fetch("v1/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let buffer = "";;) {
      const {done, value} = await reader.read();
      if (done) break;
      const events = (buffer + value).split("\\n\\n"); buffer = events.pop();
      for (const text of events) {
        if (text === "data: [DONE]") continue;
        const chunk = JSON.parse(text.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        chunk.choices.forEach(choice => { count += 1; show(choice); });
      }
    }
    at("status").textContent = `${count} tokens, ${(1000 * count / (performance.now() - started)).toFixed(1)} per second`;
  } catch (error) {
    at("status").textContent = error.name === "AbortError" ? "stopped" : error.message;
    at("status").className = error.name === "AbortError" ? "" : "error";
  } finally { at("go").disabled = false; at("stop").disabled = true; }
}
document.querySelector("form").addEventListener("submit", run);
at("stop").addEventListener("click", () => control.abort());
</script></body></html>
"""


_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_THREADS = 2  # for requests and complete answers; the same number for pieces of streams; one for embeddings
_TOLD = 64  # ignored fields that the log names
RETRY_SECONDS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePolicy:
    """api_key: bearer token that clients must send, if set.
    max_waiting: most prompts that wait for the engine.
    limits: per request.
    stops, max_tokens: defaults for requests. Without max_tokens, answers end at the end of the context.
    tool_format: format of tool calls, by default derived from the chat template.
    hosts: names of this server that need no key, in addition to localhost and this machine's names.
    origins: web pages that may send requests.
    """

    api_key: str | None = None
    max_waiting: int = 256
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)
    tool_format: Format | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


class Server:
    """The routes for one model. `app` is an ASGI application. `stop` ends the engine's thread after running answers.

    The event loop only receives and sends. Threads parse bodies and convert between texts and tokens, so that no request blocks the loop.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        opened: Opened,
        policy: ServePolicy,
        sampling: SamplingParams,
        incoming: Incoming | None = None,
    ) -> None:
        """incoming: takes new weights, for a generator that can switch to them."""
        self._incoming = incoming
        self._opened, self._policy, self._usual = opened, policy, sampling
        self._max_len, self._names = generator.max_len, (opened.name, *generator.adapters)
        self._reader = Reader(
            generator,
            opened=opened,
            max_waiting=policy.max_waiting,
            max_tokens=policy.max_tokens,
            limits=policy.limits,
            format=policy.tool_format,
        )
        self._stored = Stored()
        self._told: set[str] = set()  # ignored fields that the log has named
        self._started = int(time.time())
        self._answering = 0  # requests, on the event loop
        self._loop = EngineLoop(generator, max_waiting=policy.max_waiting, name=opened.name)
        self._whole, self._pieces, self._vectors = (
            ThreadPoolExecutor(count, thread_name_prefix=f"ztk-serve-{name}")
            for name, count in (("whole", _THREADS), ("pieces", _THREADS), ("vectors", 1))
        )
        given = {"generator": generator, "loop": self._loop, "most": policy.limits.body_bytes}
        taking = None if incoming is None else WeightRoutes(incoming, **given, in_thread=self._in_thread)
        routes = Starlette(
            routes=[
                *weight_routes(taking, authorise=self._authorise),
                Route("/", self._page),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),  # SageMaker's
                Route("/load", self._load),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._one_model),
                Route("/v1/completions", partial(self._answer, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, chat=True), methods=["POST"]),
                Route("/v1/responses", partial(self._answer, chat=True, is_response=True), methods=["POST"]),
                Route("/version", self._version),
                Route("/tokenize", partial(self._text, self._reader.tokenize), methods=["POST"]),
                Route("/detokenize", partial(self._text, self._reader.detokenize), methods=["POST"]),
                Route(
                    "/v1/embeddings", partial(self._text, self._reader.embeddings, pool=self._vectors), methods=["POST"]
                ),
                *(
                    Route(path, partial(self._text, answer, pool=self._vectors), methods=["POST"])
                    for answer, paths in (
                        (self._reader.score, ("/score", "/v1/score")),
                        (self._reader.rerank, ("/rerank", "/v1/rerank", "/v2/rerank")),
                    )
                    for path in paths
                ),
            ],
            exception_handlers=dict.fromkeys((BadRequest, HTTPException, ClientDisconnect, Exception), failed),
        )
        self.app = guarded(routes, policy=policy)

    def stop(self, *, drain_seconds: float) -> None:
        """Waits for running answers, then ends the engine's thread. New requests get 503."""
        self._loop.stop(drain_seconds=drain_seconds)
        self._reader.close()
        if self._incoming is not None:
            self._incoming.close()
        for pool in (self._whole, self._pieces, self._vectors):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def error(self) -> Exception | None:
        """The error that stopped the engine, which no longer answers, or None."""
        return self._loop.error

    def on_failure(self, call: Callable[[], None]) -> None:
        """Calls `call` on the engine's thread after the engine has failed and waiting requests were notified."""
        self._loop.on_failure = call
        if self._loop.error is not None:
            call()

    # Routes

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def _health(self, request: Request) -> Response:
        if self._loop.error is not None:
            return JSONResponse({"status": "failed", "error": str(self._loop.error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _load(self, request: Request) -> Response:
        """Returns the number of requests that are being answered, as vLLM."""
        return JSONResponse({"server_load": self._answering})

    async def _metrics(self, request: Request) -> Response:
        """Returns metrics in Prometheus' text format."""
        return PlainTextResponse(self._loop.metrics.text())

    async def _version(self, request: Request) -> Response:
        try:
            found = importlib.metadata.version("ztk")
        except importlib.metadata.PackageNotFoundError:  # a checkout on the path, without package metadata
            found = "unknown"
        return JSONResponse({"version": found})

    async def _text(
        self, answer: Callable[[bytes], bytes], request: Request, *, pool: ThreadPoolExecutor | None = None
    ) -> Response:
        """Processes the body in a thread. pool: separate threads for expensive routes."""
        raw = await self._received(request)
        with _by_request():
            return Response(await self._in_thread(answer, raw, pool=pool), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._names]})

    async def _one_model(self, request: Request) -> Response:
        self._authorise(request)
        name = request.path_params["name"]
        self._reader.adapter(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict:
        parent = None if name == self._opened.name else self._opened.name
        model = {"id": name, "object": "model", "created": self._started, "owned_by": "ztk"}
        return model | {"root": self._opened.name, "parent": parent, "max_model_len": self._max_len}

    # One request

    async def _answer(self, request: Request, *, chat: bool, is_response: bool = False) -> Response:
        """Parses and queues a request, and answers at once or as a stream. is_response: the body has the format of Responses."""
        raw, outbox = await self._received(request), Outbox()
        with _by_request():
            reply = await self._in_thread(self._read, raw, chat=chat, outbox=outbox, is_response=is_response)
        self._submit(reply.jobs)
        self._answering += 1
        headers = header(reply.asked.ignored)
        self._tell(reply.asked.ignored)
        if reply.asked.stream:
            return Stream(self._events(reply, outbox=outbox), on_end=lambda: self._end(reply), headers=headers)
        watching = asyncio.create_task(watch(request, outbox=outbox))
        try:
            await self._collect(reply, outbox=outbox)
            body = b"" if outbox.is_left else await self._in_thread(reply.body)
        finally:
            watching.cancel()
            self._end(reply)
        return Response(body, media_type="application/json", headers=headers)

    def _end(self, reply: Reply) -> None:
        self._answering -= 1
        self._cancel(reply.jobs)

    async def _received(self, request: Request) -> bytes:
        self._authorise(request)
        return await received(request, most=self._policy.limits.body_bytes)

    def _tell(self, names: tuple[str, ...]) -> None:
        """Logs ignored fields, each once."""
        for name in names:
            if name not in self._told and len(self._told) < _TOLD:
                self._told.add(name)
                _LOGGER.warning("requests have the field %s, which has no effect on this server", shown(name))

    def _read(self, raw: bytes, *, chat: bool, outbox: Outbox, is_response: bool) -> Reply:
        """Parses a request, in a thread. Requests without a seed get a random one. Raises ValueError as `Reader.jobs`."""
        usual = replace(self._usual, seed=secrets.randbits(62))
        body, policy = parsed(raw), self._policy
        turn = read_turn(body, stored=self._stored) if is_response else None
        body = body if turn is None else turn.body
        asked = read_body(body, chat=chat, usual=usual, stops=policy.stops, limits=policy.limits)
        name = "resp_" if is_response else "chatcmpl-" if chat else "cmpl-"
        model = asked.model or self._opened.name
        shape = Shape(id=f"{name}{uuid.uuid4().hex}", model=model, chat=chat, created=int(time.time()))
        jobs = self._reader.jobs(asked, chat=chat, outbox=outbox)
        reply = Reply if turn is None else partial(ResponseReply, turn=turn, stored=self._stored)
        return reply(jobs, asked=asked, shape=shape, tokenizer=self._opened.tokenizer, format=self._reader.format)

    def _submit(self, jobs: list[Job]) -> None:
        """Queues all jobs or none. Raises BadRequest if there are too many."""
        try:
            for job in jobs:
                self._loop.submit(job)
        except Busy:
            self._cancel(jobs)
            text = f"{self._policy.max_waiting} prompts wait already: try again later"
            raise BadRequest(text, status=429, headers={"Retry-After": str(RETRY_SECONDS)}) from None
        except RuntimeError as error:
            self._cancel(jobs)
            raise BadRequest(str(error), status=503) from None

    async def _collect(self, reply: Reply, *, outbox: Outbox) -> None:
        """Collects outputs until all answers have ended, or the client has disconnected. Raises BadRequest."""
        while not reply.is_complete and (items := await outbox.take()):
            reply.keep(items)
            if reply.asked.stops:  # a stop text may end an answer before the engine does
                await self._in_thread(reply.take_kept, pool=self._pieces)
                self._cancel(reply.take_ended())

    async def _events(self, reply: Reply, *, outbox: Outbox) -> AsyncIterator[bytes]:
        """Yields server-sent events."""
        try:
            if opening := await self._in_thread(reply.opening):
                yield opening
            while not reply.is_complete and (items := await outbox.take()):
                reply.keep(items)
                pool = self._whole if reply.is_large else self._pieces
                events = await self._in_thread(reply.take_kept, pool=pool)
                self._cancel(reply.take_ended())
                if events:
                    yield events
            yield await self._in_thread(reply.closing)  # which may store a long conversation
        except BadRequest as error:
            yield reply.failing(error)
        except Exception as error:
            _LOGGER.exception("a stream ends by an error")
            yield reply.failing(BadRequest(f"{type(error).__name__}: {error}", status=500))

    async def _in_thread(
        self, call: Callable[..., _T], *given: object, pool: ThreadPoolExecutor | None = None, **named: object
    ) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool or self._whole, lambda: call(*given, **named))

    def _cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._loop.cancel(job)

    def _authorise(self, request: Request) -> None:
        """Raises BadRequest for a request without the key."""
        authorise(request, key=self._policy.api_key)


@contextmanager
def calm_process() -> Iterator[None]:
    """Context of a serving process.

    The event loop waits at most 1 ms for a Python thread, instead of 5, and existing objects are excluded from garbage collections, which
    block all threads.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # triton's bindings report objects that the last collection does not find
        sys.setswitchinterval(before)


def guarded(app: ASGIApp, *, policy: ServePolicy) -> ASGIApp:
    """Returns the application with restrictions on requests from web pages."""
    if policy.api_key is None:
        app = Guard(app, hosts=policy.hosts, origins=policy.origins)
    if policy.origins:
        app = CORSMiddleware(
            app,
            allow_origins=policy.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-ztk-ignored-fields"],
        )
    return app


@contextmanager
def _by_request() -> Iterator[None]:
    """Context of code whose ValueErrors are faults of the request."""
    try:
        yield
    except BadRequest:
        raise
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def failed(request: Request, error: Exception) -> Response:
    """The response to a request whose route has raised an error."""
    match error:
        case BadRequest():
            return failure(error)
        case ClientDisconnect():
            return failure(BadRequest("the client has left before the end of its request"))
        case HTTPException():
            text = f"{request.method} {request.url.path}: {error.detail}; see /v1/models, /v1/completions, /v1/chat/completions"
            return failure(BadRequest(text, status=error.status_code, headers=dict(error.headers or {})))
    return failure(BadRequest(f"{type(error).__name__}: {error}", status=500))
