"""Clients of servers: HTTP calls with their errors, and the API by which `task=serve` draws and takes weights.

A client translates for one server. A `Fleet` decides which server computes a piece of work, and when.
"""

import base64
import http.client
import json
import socket
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ztk.core.runtime.comm.pulls import address_of
from ztk.inference import Completion, SamplingParams
from ztk.inference.sample import cut_of

LATE = "late"  # why an answer ended, besides the engine's reasons
PROBE_SECONDS = 10.0  # until a server that does not answer a short question counts as gone
_EVENT = b"data: "
_PROBES_SECONDS, _SILENT_SECONDS = 5, 30  # between packets to a machine that is silent, and until it counts as gone


class ServerFault(ValueError):
    """A server that cannot compute for this run, whatever happens."""


class Failed(RuntimeError):
    """A server that could not compute an answer."""


class Later(RuntimeError):
    """A server that has no room now, or is given weights by another trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The results of a piece of work, in its order, and the names of the weights that computed them."""

    results: Sequence[Any]
    versions: Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A rank whose `Offer` has a part of the weights. node: the name of its machine. host: an address of that machine for servers."""

    node: str
    host: str
    port: int
    secret: str


Weights = Path | Sequence[Owner]  # a folder of safetensors, or the ranks that offer them


class Client(Protocol):
    """One server. Threads call it at the same time. A call raises ServerFault, Failed, Later, or another error of a server that is gone.

    sent_bytes: bytes of weights that were sent so far.
    """

    channel: "Channel"
    sent_bytes: int

    def look(self) -> str | None:
        """Returns the version of the server's weights, or None if it is unknown."""
        ...

    def send(self, *, version: str, weights: "Weights") -> None:
        """Gives the server weights and their version."""
        ...

    def answer(self, given: Any, *, version: str, connection: http.client.HTTPConnection) -> Reply:
        """Returns the results of a piece of work. given: `Work.given`. version: the server's at the latest look. connection: a new one of
        `channel`.
        """
        ...


class Channel:
    """HTTP requests to one server. url: its address, or its name in messages if it moves. seconds: until a request counts as lost. api_key:
    sent as a bearer token. find: returns the address now, and raises ConnectionError while there is none.
    """

    def __init__(
        self, url: str, *, seconds: float, api_key: str | None = None, find: Callable[[], str] | None = None
    ) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        self._find = find or (lambda: self.url)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def connect(self, *, seconds: float | None = None) -> http.client.HTTPConnection:
        """A connection for one request, which opens with it. Raises ConnectionError if there is no address."""
        place = urlsplit(self._find())
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        seconds = self.seconds if seconds is None else seconds
        return kind(place.hostname or "", place.port, timeout=seconds, blocksize=1 << 20)

    def own_host(self) -> str:
        """The address of this machine from which it reaches the server, without a packet. Raises OSError for a name that is not known."""
        place = urlsplit(self._find())
        kind, _, _, _, target = socket.getaddrinfo(place.hostname, place.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return probe.getsockname()[0]

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = b"",
        size: int | None = None,
        seconds: float | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Any:
        """Returns the reply's JSON, or None without a body. size: bytes of a body that is a file. connection: a new one by default.

        Raises ServerFault for a refusal, Failed for an error of the server, and Later.
        """
        connection = self.connect(seconds=seconds) if connection is None else connection
        length = {} if size is None else {"Content-Length": str(size)}
        with self._replied(connection, method, path, body=body, headers=length) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def events(self, path: str, *, body: bytes, connection: http.client.HTTPConnection) -> Generator[Any]:
        """Yields the JSON of each event that answers a POST. A generator that is closed ends the request.

        Raises as `request`, Failed for an error between the events, and ConnectionError for a stream without an end.
        """
        with self._replied(connection, "POST", path, body=body, headers={}) as reply:
            for line in reply:
                if not line.startswith(_EVENT):
                    continue
                if (text := line.removeprefix(_EVENT).strip()) == b"[DONE]":
                    return
                event = json.loads(text)
                if "error" in event:
                    kind = ServerFault if event["error"].get("type") == "invalid_request_error" else Failed
                    raise kind(f"POST {path} of {connection.host}:{connection.port}: {_message(text)}")
                yield event
        raise ConnectionError(f"POST {path} of {connection.host}:{connection.port}: the stream has no end")

    @contextmanager
    def _replied(
        self, connection: http.client.HTTPConnection, method: str, path: str, *, body: Any, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """The reply to a request, whose body is not read yet. Raises as `request`."""
        try:
            connection.connect()
            _end_if_silent(connection.sock)
            connection.request(method, path, body=body, headers=self._headers | dict(headers))
            with connection.getresponse() as reply:
                if reply.status == http.client.OK:
                    yield reply
                    return
                text = reply.read()
        finally:
            if connection.sock is not None:
                connection.close()
        place = f"{method} {path} of {connection.host}:{connection.port}: {reply.status} {_message(text)}"
        if reply.status in (408, 409, 429):
            raise Later(place)
        raise (ServerFault if reply.status < 500 else ConnectionError if reply.status == 503 else Failed)(place)


def _end_if_silent(connection: socket.socket) -> None:
    """Ends a connection whose machine has lost its power or its network. The kernel of a busy or stopped server goes on answering."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBES_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBES_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_SECONDS // _PROBES_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)


def _message(text: bytes) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")


@dataclass(kw_only=True)
class Answer(Completion):
    """versions: name of the weights that drew each token."""

    versions: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Answers to one prompt. sampling: settings of each answer, which differ in their keys alone. late: event after which the request ends
    as soon as each answer has a token; answers that have not ended by themselves have the reason `LATE`.
    """

    prompt: Sequence[int]
    sampling: Sequence[SamplingParams]
    late: threading.Event | None = None


class ZtkClient:
    """A server of `task=serve` with `serve.weights_path`. parameters: shapes by name, which its model must have. ranks: number of ranks
    that must divide the model, for equal bits, or None for any. reads: the server reads the files from the folder itself.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        parameters: Mapping[str, Sequence[int]],
        ranks: int | None = None,
        reads: bool = False,
    ) -> None:
        self.channel, self._parameters, self._ranks, self._reads, self.sent_bytes = channel, parameters, ranks, reads, 0

    def look(self) -> str | None:
        """Returns the version of the weights. Raises ServerFault if the model is another one, or divided over another number of ranks."""
        state = self.channel.request("GET", "/v1/weights", seconds=PROBE_SECONDS)
        theirs = {name: tuple(shape) for name, shape in state["parameters"].items()}
        own = {name: tuple(shape) for name, shape in self._parameters.items()}
        for name in sorted(theirs.keys() | own.keys()):
            if theirs.get(name) != own.get(name):
                raise ServerFault(
                    f"rollout.servers: {self.channel.url} has another model: {name} is {theirs.get(name)} there and {own.get(name)} here; "
                    "start it with inference.model of this run's shape"
                )
        if self._ranks is not None and state["ranks"] != self._ranks:
            raise ServerFault(
                f"rollout.servers: {self.channel.url} divides its model over {state['ranks']} ranks and this run over {self._ranks}, so sums "
                f"round in another way; start it with topology.tensor={self._ranks}, or use rollout.identity=corrected"
            )
        return state["version"]

    def send(self, *, version: str, weights: Weights) -> None:
        """Sends the files one after the other, or has the server read them, or each of its ranks pull its part. It takes them between two steps
        of its engine.
        """
        begin = {"version": version, "on_update": "continue"}
        if not isinstance(weights, Path) or self._reads:
            is_folder = isinstance(weights, Path)
            where = {"path": str(weights)} if is_folder else {"offer": self._addresses(weights, version=version)}
            body = json.dumps(begin | where).encode()
            self.sent_bytes += self.channel.request("POST", "/v1/weights", body=body)["bytes"]
            return
        self.channel.request("POST", "/v1/weights", body=json.dumps(begin).encode())
        for file in sorted(weights.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as part:
                self.channel.request("PUT", f"/v1/weights/{version}", body=part, size=size)
            self.sent_bytes += size
        self.channel.request("POST", f"/v1/weights/{version}")

    def _addresses(self, owners: Sequence[Owner], *, version: str) -> str:
        own, host = socket.gethostname(), self.channel.own_host()
        return ",".join(
            address_of(owner.secret, host=host if owner.node == own else owner.host, port=owner.port, version=version)
            for owner in owners
        )

    def answer(self, given: Draw, *, version: str, connection: http.client.HTTPConnection) -> Reply:
        """Draws with the numbers of the keys. Tokens have the versions that the server names."""
        if given.late is None:
            reply = self.channel.request("POST", "/v1/completions", body=_body(given), connection=connection)
        else:
            reply = self._streamed(given, late=given.late, connection=connection)
        cuts = not cut_of(given.sampling[0]).keeps_all
        answers = _answers(reply, count=len(given.sampling), cuts=cuts)
        return Reply(results=answers, versions={version for one in answers for version in one.versions})

    def _streamed(
        self, given: Draw, *, late: threading.Event, connection: http.client.HTTPConnection
    ) -> dict[str, list[dict[str, Any]]]:
        """The reply, or the part of it that has come when the answers are late."""
        found = [_Streamed() for _ in given.sampling]
        with closing(self.channel.events("/v1/completions", body=_body(given), connection=connection)) as events:
            for event in events:
                for choice in event["choices"]:
                    found[choice["index"]].add(choice)
                if late.is_set() and all(one.tokens for one in found):
                    break
        return {"choices": [one.choice(index) for index, one in enumerate(found)]}


@dataclass(kw_only=True)
class _Streamed:
    """An answer of a stream so far. runs: the field `versions` of its tokens. kept: the fields `kept_token_ids`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed: list[float] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    kept_counts: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Adds the tokens of an event's choice."""
        logprobs = choice["logprobs"] or {}
        self.tokens += choice["token_ids"]
        self.logprobs += logprobs.get("token_logprobs", [])
        self.processed += logprobs.get("processed_token_logprobs", [])
        self.runs += choice.get("versions") or []
        self.kept.append(logprobs.get("kept_token_ids", ""))
        self.kept_counts += logprobs.get("kept_counts", [])
        self.finish_reason = choice["finish_reason"]

    def choice(self, index: int) -> dict[str, Any]:
        """The choice of a reply without a stream."""
        kept = base64.b64encode(b"".join(map(base64.b64decode, self.kept))).decode()
        return {
            "index": index,
            "token_ids": self.tokens,
            "finish_reason": self.finish_reason or LATE,
            "versions": self.runs,
            "logprobs": {
                "token_logprobs": self.logprobs,
                "processed_token_logprobs": self.processed,
                "kept_token_ids": kept,
                "kept_counts": self.kept_counts,
            },
        }


def _body(given: Draw) -> bytes:
    """A request for one answer per `sampling`. It has all fields that have defaults on the server."""
    one = given.sampling[0]
    fields = {
        "prompt": [list(given.prompt)] * len(given.sampling),
        "draw_keys": [own.draw_key for own in given.sampling],
        "max_tokens": one.max_tokens,
        "temperature": one.temperature,
        "seed": one.seed,
        "fp32_logprobs": one.fp32_logprobs,
        "stop_token_ids": list(one.stop_token_ids),
        "ignore_eos": True,
        "stop": [],
        "stream": given.late is not None,
        "logprobs": 0,
        "return_token_ids": True,
        "top_k": one.top_k,
        "top_p": one.top_p,
        "min_p": one.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return json.dumps(fields).encode()


def _answers(reply: Mapping[str, Any], *, count: int, cuts: bool) -> list[Answer]:
    """The answers of a reply. cuts: they have the tokens that top-k, top-p and min-p kept.

    Raises ConnectionError if some are missing, or lack the versions of their tokens, and ServerFault as `_kept_of`.
    """
    choices = sorted(reply["choices"], key=lambda one: one["index"])
    if len(choices) != count:
        raise ConnectionError(f"{len(choices)} answers instead of {count}")
    found = list[Answer]()
    for choice in choices:
        runs = choice.get("versions") or []
        versions = [str(run["version"]) for run in runs for _ in range(run["tokens"])]
        if len(versions) != len(choice["token_ids"]):
            raise ConnectionError(f"an answer of {len(choice['token_ids'])} tokens was drawn with the weights {runs}")
        found.append(
            Answer(
                tokens=choice["token_ids"],
                logprobs=torch.tensor(choice["logprobs"]["token_logprobs"], dtype=torch.float32),
                processed_logprobs=torch.tensor(choice["logprobs"]["processed_token_logprobs"], dtype=torch.float32),
                finish_reason=choice["finish_reason"],
                kept=_kept_of(choice["logprobs"], count=len(versions)) if cuts else None,
                versions=versions,
            )
        )
    return found


def _kept_of(logprobs: Mapping[str, Any], *, count: int) -> list[Tensor]:
    """Raises ServerFault for a server that does not send the tokens that its cut kept."""
    if len(counts := logprobs.get("kept_counts", ())) != count:
        raise ServerFault(
            "rollout.servers: a server does not send the tokens that rollout.top_k, top_p and min_p kept; start it with this version of ztk"
        )
    data = bytearray(base64.b64decode(logprobs.get("kept_token_ids", "")))
    return list(
        (torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)).split(counts)
    )
