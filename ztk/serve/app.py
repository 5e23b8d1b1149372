"""OpenAI's HTTP interface over a `Generator`."""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ztk.inference import Generator, Output, SamplingParams
from ztk.serve.answers import Answer, Shape
from ztk.serve.bodies import Asked, BadRequest, read_body
from ztk.serve.loop import Busy, EngineLoop, Job
from ztk.serve.models import Opened
from ztk.serve.page import PAGE

RETRY_SECONDS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePolicy:
    """api_key: what clients must send as bearer token; None: nothing. max_waiting: prompts that wait for a place, at most. stops: texts that
    end an answer whose request names none."""

    api_key: str | None = None
    max_waiting: int = 256
    stops: tuple[str, ...] = ()


class Server:
    """The routes over one model. `app` is an ASGI application; `stop` ends the engine's thread after running answers."""

    def __init__(self, generator: Generator, *, opened: Opened, policy: ServePolicy, sampling: SamplingParams) -> None:
        self._opened, self._policy, self._usual = opened, policy, sampling
        self._vocabulary_size = generator.description.vocab_size
        self._max_len = generator.max_len
        self._check = generator.check  # reads what does not change
        self._started = int(time.time())
        self._loop = EngineLoop(generator, max_waiting=policy.max_waiting)
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._one_model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def stop(self, *, drain_seconds: float) -> None:
        """Waits for running answers, then ends the engine's thread. New requests get 503."""
        self._loop.stop(drain_seconds=drain_seconds)

    @property
    def error(self) -> Exception | None:
        """Why the engine has ended, if it has failed: it answers nothing any more."""
        return self._loop.error

    def on_failure(self, call: Callable[[], None]) -> None:
        """`call` runs on the engine's thread when the engine has failed and those who wait for it have heard of it."""
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

    async def _metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        counters = {f"ztk_{name}_total": value for name, value in vars(self._loop.counters).items()}
        gauges: dict[str, float] = {
            "ztk_requests_running": self._loop.running,
            "ztk_requests_waiting": self._loop.waiting,
        }
        if (seconds := self._loop.first_token_seconds) is not None:
            gauges["ztk_first_token_seconds"] = seconds
        lines = [f"# TYPE {name} counter\n{name} {value}" for name, value in counters.items()]
        lines += [f"# TYPE {name} gauge\n{name} {value}" for name, value in gauges.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _models(self, request: Request) -> Response:
        if (refusal := self._unauthorised(request)) is not None:
            return refusal
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        if (refusal := self._unauthorised(request)) is not None:
            return refusal
        name = request.path_params["name"]
        return JSONResponse(self._described()) if name == self._opened.name else refused(self._unknown(name))

    def _described(self) -> dict:
        model = {"id": self._opened.name, "object": "model", "created": self._started, "owned_by": "ztk"}
        return model | {"max_model_len": self._max_len}

    def _unknown(self, name: str) -> BadRequest:
        text = (
            f"The model '{name}' does not exist: this server has '{self._opened.name}'; leave model out, or name that"
        )
        return BadRequest(text, param="model", status=404, code="model_not_found")

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    # One request

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        """Reads, queues, and answers at once or as a stream."""
        if (refusal := self._unauthorised(request)) is not None:
            return refusal
        try:
            asked = self._read(await request.body(), chat=chat)
            jobs = self._jobs(asked, chat=chat)
        except ValueError as error:
            return refused(error)
        shape = Shape(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=self._opened.name,
            chat=chat,
            created=int(time.time()),
        )
        answers = [
            Answer(
                shape=shape,
                index=prompt * asked.sampling.n + sample,
                prompt=job.prompt,
                asked=asked,
                tokenizer=self._opened.tokenizer,
            )
            for prompt, job in enumerate(jobs)
            for sample in range(asked.sampling.n)
        ]
        if (refusal := self._submit(jobs)) is not None:
            return refusal
        if asked.stream:
            events = self._stream(jobs, answers=answers, shape=shape, asked=asked)
            return _Stream(events, on_end=lambda: self._cancel(jobs))
        try:
            async for _ in self._pieces(jobs, answers=answers, request=request):
                pass
        except _Failed as error:
            return failure(500, message=str(error))
        finally:
            self._cancel(jobs)
        return JSONResponse(shape.complete(answers, prompt_tokens=sum(len(job.prompt) for job in jobs)))

    def _read(self, body: bytes, *, chat: bool) -> Asked:
        """Requests that name no seed have one of their own. Raises BadRequest."""
        usual = replace(self._usual, seed=secrets.randbits(62))
        return read_body(body, chat=chat, usual=usual, stops=self._policy.stops)

    def _submit(self, jobs: list[Job]) -> Response | None:
        """Queues all or none; else the refusal."""
        try:
            for job in jobs:
                self._loop.submit(job)
        except Busy:
            self._cancel(jobs)
            text = f"{self._policy.max_waiting} prompts wait already: try again later"
            return failure(429, message=text, headers={"Retry-After": str(RETRY_SECONDS)})
        except RuntimeError as error:
            return failure(503, message=str(error))
        return None

    def _jobs(self, asked: Asked, *, chat: bool) -> list[Job]:
        """One per prompt.

        Raises:
            ValueError: another model, no chat template, more prompts than may wait, or a prompt that does not fit the model.
        """
        if asked.model not in (None, self._opened.name):
            raise self._unknown(asked.model)
        if len(asked.prompts) > self._policy.max_waiting:
            raise BadRequest(
                f"{len(asked.prompts)} prompts in one request, and {self._policy.max_waiting} may wait at most: send fewer at a time",
                param="prompt",
            )
        encode = self._opened.tokenizer.encode
        prompts = [list(prompt) if not isinstance(prompt, str) else encode(prompt) for prompt in asked.prompts]
        if chat:
            prompts = [self._opened.tokenizer.chat(list(asked.messages))]
        running = asyncio.get_running_loop()
        jobs = []
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise BadRequest("the prompt is empty", param="prompt")
            for param, tokens in (("prompt", prompt), ("logit_bias", asked.sampling.logit_bias)):
                odd = next((token for token in tokens if not 0 <= token < self._vocabulary_size), None)
                if odd is not None:
                    raise BadRequest(f"token {odd} is outside the vocabulary of {self._vocabulary_size}", param=param)
            if len(prompt) + asked.sampling.max_tokens > self._max_len:
                raise BadRequest(
                    f"This model's maximum context length is {self._max_len} tokens. The prompt has {len(prompt)} tokens and max_tokens is "
                    f"{asked.sampling.max_tokens}: shorten the prompt, or lower max_tokens",
                    param="max_tokens",
                )
            self._check(prompt, sampling=asked.sampling)
            ends = (*(() if asked.ignores_ends else self._opened.ends), *asked.stop_token_ids)
            sampling = replace(asked.sampling, draw_key=(number,), stop_token_ids=ends, token_mask=self._mask())
            jobs.append(Job(prompt=prompt, sampling=sampling, loop=running))
        return jobs

    def _mask(self) -> Any:
        """Tokens without a text are not drawn."""
        if self._opened.vocabulary >= self._vocabulary_size:
            return None
        allowed = torch.arange(self._vocabulary_size) < self._opened.vocabulary
        return lambda answer: allowed

    async def _stream(
        self, jobs: list[Job], *, answers: list[Answer], shape: Shape, asked: Asked
    ) -> AsyncIterator[str]:
        """Server-sent events."""
        try:
            for answer in answers:
                for chunk in answer.opening():
                    yield _event(chunk)
            async for chunk in self._pieces(jobs, answers=answers, request=None):
                yield _event(chunk)
            if asked.with_usage:
                yield _event(shape.usage_chunk(answers, prompt_tokens=sum(len(job.prompt) for job in jobs)))
            yield "data: [DONE]\n\n"
        except _Failed as error:
            yield _event({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}})

    async def _pieces(self, jobs: list[Job], *, answers: list[Answer], request: Request | None) -> AsyncIterator[dict]:
        """Chunks of all answers as they are drawn, until all have ended. request: left early if its client is gone."""
        queue: asyncio.Queue = asyncio.Queue()  # (number of the job, what it was delivered); None: the client is gone
        each = len(answers) // len(jobs)

        async def forward(number: int, job: Job) -> None:
            while True:
                item = await job.outputs.get()
                await queue.put((number, item))
                if isinstance(item, Exception):
                    return

        async def watch(request: Request) -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            await queue.put(None)

        tasks = [asyncio.create_task(forward(number, job)) for number, job in enumerate(jobs)]
        if request is not None:
            tasks.append(asyncio.create_task(watch(request)))
        try:
            while not all(answer.ended for answer in answers):
                if (found := await queue.get()) is None:
                    return
                number, item = found
                if isinstance(item, Exception):
                    raise _Failed(str(item))
                answer = answers[number * each + item.sample]
                for chunk in self._take(answer, output=item):
                    yield chunk
                if all(answer.ended for answer in answers[number * each : (number + 1) * each]):
                    self._loop.cancel(jobs[number])  # a stop text ends it here, the engine would go on
        finally:
            for task in tasks:
                task.cancel()

    def _take(self, answer: Answer, *, output: Output) -> list[dict]:
        if output.error is not None:
            raise _Failed(output.error)
        return answer.push(output)

    def _cancel(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._loop.cancel(job)

    def _unauthorised(self, request: Request) -> Response | None:
        key = self._policy.api_key
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key is None or secrets.compare_digest(sent.encode(), key.encode()):
            return None
        return failure(401, message="Incorrect API key: send it as Authorization: Bearer KEY", code="invalid_api_key")


class _Failed(Exception):
    pass


def refused(error: ValueError) -> JSONResponse:
    """400, or what a `BadRequest` says."""
    known = error if isinstance(error, BadRequest) else BadRequest(str(error))
    return failure(known.status, message=str(known), param=known.param, code=known.code)


class _Stream(StreamingResponse):
    """Server-sent events. on_end: is called in any case, also where the client has left before the first event was asked for: a generator
    that has not begun has no end of its own."""

    def __init__(self, events: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
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
    """OpenAI's error body."""
    kinds = {
        400: "invalid_request_error",
        401: "invalid_request_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
    }
    body = {"message": message, "type": kinds.get(status, "server_error"), "param": param, "code": code}
    return JSONResponse({"error": body}, status_code=status, headers=headers)


def _event(chunk: dict) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
