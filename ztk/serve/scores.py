"""An HTTP server for a reward model: `/classify` with the fields of vLLM, and `/v1/models`."""

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ztk.serve.app import RETRY_SECONDS, ServePolicy, failed, guarded
from ztk.serve.http import authorise, received
from ztk.serve.values import BadRequest, flag, parsed


class Scorer(Protocol):
    """A reward model. vocabulary: number of its tokens. longest: tokens that it reads at most."""

    vocabulary: int
    longest: int

    def tokens(self, text: str | Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of a text or of a conversation. Raises ValueError if it has no tokenizer, or no chat template."""
        ...

    def values(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Returns the value of each text, in one forward."""
        ...


class ScoreServer:
    """The routes for one reward model. `app` is an ASGI application. A thread computes one request after the other."""

    def __init__(self, scorer: Scorer, *, name: str, policy: ServePolicy) -> None:
        self._scorer, self._name, self._policy = scorer, name, policy
        self._started, self._waiting = int(time.time()), 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ztk-serve-scores")
        routes = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/load", self._load),
                Route("/v1/models", self._models),
                Route("/classify", self._classify, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((BadRequest, HTTPException, ClientDisconnect, Exception), failed),
        )
        self.app = guarded(routes, policy=policy)

    def stop(self) -> None:
        """Drops requests that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._waiting})

    async def _models(self, request: Request) -> Response:
        authorise(request, key=self._policy.api_key)
        model = {"id": self._name, "object": "model", "created": self._started, "owned_by": "ztk"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self._scorer.longest}]})

    async def _classify(self, request: Request) -> Response:
        authorise(request, key=self._policy.api_key)
        raw = await received(request, most=self._policy.limits.body_bytes)
        if self._waiting >= self._policy.max_waiting:
            text = f"{self._waiting} requests wait already: try again later"
            raise BadRequest(text, status=429, headers={"Retry-After": str(RETRY_SECONDS)})
        self._waiting += 1
        try:
            body = await asyncio.get_running_loop().run_in_executor(self._thread, self._scored, raw)
        finally:
            self._waiting -= 1
        return Response(body, media_type="application/json")

    def _scored(self, raw: bytes) -> bytes:
        body = parsed(raw)
        if flag(body, name="use_activation", usual=True):
            raise BadRequest(
                "use_activation=true: rewards are values without an activation; send false", param="use_activation"
            )
        texts = self._texts(body)
        values = self._scorer.values(texts)
        count = sum(map(len, texts))
        data = [
            {"index": index, "label": "LABEL_0", "probs": [value], "num_classes": 1}
            for index, value in enumerate(values)
        ]
        named = {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._name,
        }
        return json.dumps(named | {"data": data, "usage": {"prompt_tokens": count, "total_tokens": count}}).encode()

    def _texts(self, body: dict[str, Any]) -> list[list[int]]:
        """Returns the tokens of every text. Raises BadRequest for others than the model reads."""
        param = "messages" if "messages" in body else "input"
        texts = _inputs(body, param=param)
        if len(texts) > self._policy.limits.answers:
            raise BadRequest(
                f"{len(texts)} texts, and this server takes {self._policy.limits.answers} at a time", param=param
            )
        try:
            found = [list(one) if _is_tokens(one) else self._scorer.tokens(one) for one in texts]
        except BadRequest:
            raise
        except ValueError as error:
            raise BadRequest(str(error), param=param) from error
        for tokens in found:
            if not 0 < len(tokens) <= self._scorer.longest:
                raise BadRequest(f"a text has {len(tokens)} tokens: send 1 to {self._scorer.longest}", param=param)
            if not all(0 <= token < self._scorer.vocabulary for token in tokens):
                raise BadRequest(f"a token is none of the model's {self._scorer.vocabulary}", param=param)
        return found


def _inputs(body: dict[str, Any], *, param: str) -> list[Any]:
    """Returns texts, lists of tokens, or one conversation."""
    given = body.get(param)
    if param == "messages":
        if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
            raise BadRequest("messages must be a list of objects", param=param)
        return [given]
    texts = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) or _is_tokens(one) for one in texts):
        raise BadRequest("input must be a text, a list of tokens, or a list of one of them", param=param)
    return texts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
