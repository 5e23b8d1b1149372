"""Servers of `task=serve` that draw for a trainer: asked by load, given the newest weights, and replaced by each other when one is gone.

An answer depends on the weights, its prompt and the key of its random numbers alone, so any server may give it, and two may be asked. A server
has a thread, its keeper, that sends it the newest weights whenever it has others: after an update, a loss or a restart.
"""

import base64
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ztk.core.runtime.comm.pulls import Offer
from ztk.inference import Completion, SamplingParams
from ztk.inference.sample import cut_of

_ROWS, _MOST = 32, 64  # answers of one request, and those under way at one server
_BEAT_SECONDS, _PROBE_SECONDS = 0.2, 10.0  # between looks at a server, and until one counts as gone
_SLOWER, _FIRST_SECONDS = (
    3.0,
    30.0,
)  # a request this many times as old as the slowest before, or so old, is also sent elsewhere
_AFFINE = 64  # first tokens of a prompt, which choose its server
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names
Open = Callable[[Path], Any]  # a file of safetensors, as its `safe_open`
_TRIES = 3  # failures of a server to answer one request, before they end the run


class ServersLost(RuntimeError):
    """No server of rollout.servers answers."""


class ServerFault(ValueError):
    """A server that cannot draw for this run, whatever happens."""


@dataclass(kw_only=True)
class Answer(Completion):
    """versions: names of the weights that drew each token."""

    versions: list[str]


@dataclass(kw_only=True, eq=False)
class _Server:
    """version: name of its weights, or None if it is unknown or the server is gone. rows: under way. error: the last one.

    answers, tokens: numbers of those that counted. seconds: sum over their requests. failures: requests without an answer.
    """

    url: str
    version: str | None = None
    rows: int = 0
    error: str = "it has not answered yet"
    sent_bytes: int = 0
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0
    failures: int = 0


@dataclass(kw_only=True, eq=False)
class _Asked:
    """A request to a server. version: that the server had. connection: open while it is under way."""

    part: "_Part"
    server: _Server
    version: str
    began: float
    connection: http.client.HTTPConnection


@dataclass(kw_only=True, eq=False)
class _Part:
    """Rows with one prompt. oldest: number of the first version that may draw. cuts: they are drawn from a part of the tokens. asked: requests
    for them that are under way.
    """

    rows: list[int]
    body: bytes
    prefix: tuple[int, ...]
    oldest: int = 0
    cuts: bool = False
    found: list[Answer] | None = None
    asked: list[_Asked] = field(default_factory=list)
    failures: int = 0


class Fleet:
    """The servers of a run. `generate` may be called in several threads; servers with room serve earlier calls first.

    api_key: the key of all of them. patience_seconds: without a server that answers. parameters: shapes by name, which the servers' models
    must have. sends: gives servers the newest weights; on one rank. The others wait for that. opens: opens a file of weights, whose tensors
    servers then pull over gloo; None sends files by HTTP.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        parameters: Mapping[str, Sequence[int]],
        sends: bool,
        patience_seconds: float,
        api_key: str | None = None,
        opens: Open | None = None,
    ) -> None:
        self._opens = opens
        self._servers = [_Server(url=url.rstrip("/")) for url in urls]
        self._parameters, self._sends, self._patience = parameters, sends, patience_seconds
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._changed = threading.Condition()
        self._version: str | None = None
        self._numbers = dict[str, int]()  # of all versions so far, in order
        self._under_way = dict[int, list[_Part]]()  # by the number of their call
        self._calls = itertools.count()
        self._heard = 0.0  # time of the latest answer, or of a call without others
        self._folder: Path | None = None
        self._fault: Exception | None = None
        self._homes: dict[tuple[int, ...], _Server] = {}
        self._slowest = 0.0
        self._closed = False
        self._keepers = [
            threading.Thread(target=self._keep, args=(server,), name="ztk-keeper", daemon=True)
            for server in self._servers
        ]
        for keeper in self._keepers:
            keeper.start()

    def publish(self, version: str, *, folder: Path | None) -> None:
        """Draws with these weights from now on, and goes on with them where answers have begun. folder: has their safetensors, on the rank that
        sends, until the next call.
        """
        with self._changed:
            self._version, self._folder = version, folder
            self._numbers.setdefault(version, len(self._numbers))
            self._changed.notify_all()

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that were sent so far, over all servers."""
        return sum(server.sent_bytes for server in self._servers)

    def describe(self) -> str:
        """A line per server about the requests of this rank: a slow one has more seconds per request."""
        lines = []
        for one in self._servers:
            each = one.seconds / max(1, one.requests)
            sent = f", {one.sent_bytes / 2**20:.1f} MiB of weights" if self._sends else ""
            lines.append(
                f"{one.url}: {one.answers} answers, {one.tokens} tokens, {each:.3f} s per request, {one.failures} failed{sent}"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Ends the threads of the servers. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for keeper in self._keepers:
            keeper.join(timeout=_PROBE_SECONDS)

    def generate(
        self, prompts: Sequence[list[int]], *, sampling: Sequence[SamplingParams], oldest: str | None = None
    ) -> list[Answer]:
        """One answer to each prompt. oldest: first of the versions that may draw, by default the newest one.

        Raises:
            ServersLost: no server has answered for the time of `patience_seconds`.
            ServerFault: a server refuses a request, or has another model.
        """
        call = next(self._calls)
        with self._changed:
            first = len(self._numbers) - 1 if oldest is None else self._numbers[oldest]
            parts = _parts_of(prompts, sampling=sampling, oldest=first)
            if not self._under_way:
                self._heard = time.monotonic()
            self._under_way[call] = parts
            try:
                while any(part.found is None for part in parts):
                    if self._fault is not None:
                        raise self._fault
                    self._hand_out()
                    self._changed.wait(_BEAT_SECONDS)
                    if time.monotonic() - self._heard > self._patience:
                        raise ServersLost(self._lost())
            finally:
                del self._under_way[call]
                for asked in [asked for part in parts for asked in part.asked]:
                    self._hang_up(asked)
        found = {row: one for part in parts for row, one in zip(part.rows, part.found or (), strict=True)}
        return [found[row] for row in range(len(prompts))]

    def _lost(self) -> str:
        states = "; ".join(f"{server.url}: {server.error}" for server in self._servers)
        return (
            f"rollout.servers: none has answered for {self._patience:g} s ({states}); start them again and resume the run, or raise "
            "rollout.servers_wait"
        )

    # Requests. The caller holds the lock.

    def _hand_out(self) -> None:
        """Sends parts to servers with weights that may draw them, earlier calls first, and late ones a second time."""
        missing = [part for _, parts in sorted(self._under_way.items()) for part in parts if part.found is None]
        for part in missing:
            if part.asked:
                continue
            server = self._chosen(part)
            if server is None:
                break
            self._ask(part, server=server)
        late = max(_SLOWER * self._slowest, 1.0) if self._slowest else _FIRST_SECONDS
        now = time.monotonic()
        for part in missing:
            if len(part.asked) == 1 and now - part.asked[0].began > late:
                idle = [one for one in self._ready(part) if not one.rows and one is not part.asked[0].server]
                if not idle:
                    break
                self._ask(part, server=idle[0])

    def _ready(self, part: _Part) -> list[_Server]:
        return [one for one in self._servers if self._number_of(one.version) >= part.oldest]

    def _number_of(self, version: str | None) -> int:
        """-1 without one of this run's."""
        return -1 if version is None else self._numbers.get(version, -1)

    def _chosen(self, part: _Part) -> _Server | None:
        """The least loaded server, or the one that has drawn for the same beginning if it is about as loaded."""
        ready = [one for one in self._ready(part) if not one.rows or one.rows + len(part.rows) <= _MOST]
        if not ready:
            return None
        least = min(ready, key=lambda one: one.rows)
        home = self._homes.get(part.prefix)
        return home if home in ready and home.rows <= least.rows + _ROWS else least

    def _ask(self, part: _Part, *, server: _Server) -> None:
        assert server.version is not None, "it is ready"
        if len(self._homes) > 1 << 16:
            self._homes.clear()
        self._homes[part.prefix] = server
        server.rows += len(part.rows)
        connection = self._connection(server, seconds=self._patience)
        asked = _Asked(part=part, server=server, version=server.version, began=time.monotonic(), connection=connection)
        part.asked.append(asked)
        threading.Thread(target=self._wait_for, args=(asked,), name="ztk-asked", daemon=True).start()

    def _hang_up(self, asked: _Asked) -> None:
        """Ends a request whose answer is not needed. Its server may not answer any more, so its keeper looks."""
        self._drop(asked)
        asked.server.version, asked.server.error = None, "it was slower than another server"
        asked.server.failures += 1
        with suppress(OSError, AttributeError):
            asked.connection.sock.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _drop(self, asked: _Asked) -> None:
        if asked in asked.part.asked:
            asked.part.asked.remove(asked)
            asked.server.rows -= len(asked.part.rows)

    # Threads of requests

    def _wait_for(self, asked: _Asked) -> None:
        part = asked.part
        error: Exception | None = None
        found: list[Answer] = []
        try:
            reply = self._called(asked.connection, "POST", "/v1/completions", body=part.body)
            found = _answers(reply, count=len(part.rows), cuts=part.cuts)
            self._check(found, part=part)
        except Exception as own:  # noqa: BLE001 - any fault is its server's
            error = own
            if isinstance(own, _Later):
                time.sleep(_BEAT_SECONDS)
        with self._changed:
            is_needed = asked in part.asked
            self._drop(asked)
            if is_needed and error is None and part.found is None:
                seconds, server = time.monotonic() - asked.began, asked.server
                part.found, self._slowest = found, max(self._slowest, seconds)
                self._heard = time.monotonic()
                server.requests, server.seconds = server.requests + 1, server.seconds + seconds
                server.answers += len(found)
                server.tokens += sum(len(one.tokens) for one in found)
                for other in list(part.asked):
                    self._hang_up(other)
            elif is_needed and error is not None:
                self._fail(asked, error=error)
            self._changed.notify_all()

    def _check(self, answers: Sequence[Answer], *, part: _Part) -> None:
        """Raises ConnectionError for tokens of other weights than may draw."""
        with self._changed:
            for version in {version for one in answers for version in one.versions}:
                if self._number_of(version) < part.oldest:
                    raise ConnectionError(
                        f"an answer was drawn with the weights {version}, which are none of this run's, or too old"
                    )

    def _fail(self, asked: _Asked, *, error: Exception) -> None:
        server, part = asked.server, asked.part
        server.failures += 1
        if isinstance(error, ServerFault):
            self._fault = error
        if isinstance(error, _Failed):
            part.failures += 1
            if part.failures >= _TRIES:
                self._fault = ServerFault(f"rollout.servers: {server.url} cannot draw: {error}")
        if isinstance(error, _Later):
            return
        if server.version == asked.version:  # else it has newer weights already
            server.version = None
        server.error = f"{type(error).__name__}: {error}"

    # Threads of servers

    def _keep(self, server: _Server) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._version is None or server.version == self._version):
                    self._changed.wait()
                if self._closed:
                    return
                version, folder = self._version, self._folder
            assert version is not None, "one was published"
            try:
                has = self._look(server)
                if has != version and self._sends:
                    assert folder is not None, "the rank that sends has the files"
                    self._send(server, version=version, folder=folder)
                    has = version
            except ServerFault as error:
                with self._changed:
                    if self._version != version:
                        continue  # the files of an older version may be gone
                    self._fault = error
                    self._changed.notify_all()
                return
            except Exception as error:  # noqa: BLE001 - it may come back
                has, server.error = None, f"{type(error).__name__}: {error}"
            with self._changed:
                if has == version:
                    server.version = version
                    self._changed.notify_all()
                elif not self._closed:
                    self._changed.wait(_BEAT_SECONDS)

    def _look(self, server: _Server) -> str | None:
        """The version of its weights. Raises ServerFault if its model is another one."""
        state = self._request(server, "GET", "/v1/weights", seconds=_PROBE_SECONDS)
        theirs = {name: tuple(shape) for name, shape in state["parameters"].items()}
        own = {name: tuple(shape) for name, shape in self._parameters.items()}
        for name in sorted(theirs.keys() | own.keys()):
            if theirs.get(name) != own.get(name):
                raise ServerFault(
                    f"rollout.servers: {server.url} has another model: {name} is {theirs.get(name)} there and {own.get(name)} here; start "
                    "it with inference.model of this run's shape"
                )
        return state["version"]

    def _send(self, server: _Server, *, version: str, folder: Path) -> None:
        if self._opens is not None:
            self._offer(
                server, version=version, files=[self._opens(path) for path in sorted(folder.glob("*.safetensors"))]
            )
            return
        begin = json.dumps({"version": version, "on_update": "continue"}).encode()
        self._request(server, "POST", "/v1/weights", body=begin)
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as part:
                self._request(server, "PUT", f"/v1/weights/{version}", body=part, size=file.stat().st_size)
            server.sent_bytes += file.stat().st_size
        self._request(server, "POST", f"/v1/weights/{version}")

    def _offer(self, server: _Server, *, version: str, files: Sequence[Any]) -> None:
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        parts = {name: file.get_slice(name) for name, file in places.items()}
        shapes = {name: (tuple(part.get_shape()), _DTYPES[part.get_dtype()]) for name, part in parts.items()}
        given = {"host": self._own_host(server), "timeout_seconds": self._patience}
        with Offer(shapes, read=lambda name: places[name].get_tensor(name), **given) as offer:
            begin = {"version": version, "on_update": "continue", "offer": offer.address}
            try:
                self._request(server, "POST", "/v1/weights", body=json.dumps(begin).encode())
            finally:
                server.sent_bytes += offer.sent_bytes

    def _own_host(self, server: _Server) -> str:
        """The address of this machine from which it reaches the server."""
        connection = self._connection(server, seconds=_PROBE_SECONDS)
        try:
            connection.connect()
            return connection.sock.getsockname()[0]
        finally:
            connection.close()

    # HTTP

    def _connection(self, server: _Server, *, seconds: float) -> http.client.HTTPConnection:
        place = urlsplit(server.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        return kind(place.hostname or "", place.port, timeout=seconds, blocksize=1 << 20)

    def _request(
        self,
        server: _Server,
        method: str,
        path: str,
        *,
        body: Any = b"",
        size: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        connection = self._connection(server, seconds=self._patience if seconds is None else seconds)
        try:
            return self._called(connection, method, path, body=body, size=size)
        finally:
            connection.close()

    def _called(
        self, connection: http.client.HTTPConnection, method: str, path: str, *, body: Any, size: int | None = None
    ) -> dict[str, Any]:
        """The reply's JSON. Raises ServerFault for a refusal, `_Failed` for an error of the server, and `_Later`."""
        length = {} if size is None else {"Content-Length": str(size)}
        try:
            connection.request(
                method, path, body=body, headers=self._headers | {"Content-Type": "application/json"} | length
            )
            reply = connection.getresponse()
            text = reply.read()
        finally:
            if connection.sock is not None:
                connection.close()
        if reply.status == http.client.OK:
            return json.loads(text)
        place = f"{method} {path} of {connection.host}:{connection.port}: {reply.status} {_message(text)}"
        if reply.status in (408, 409, 429):
            raise _Later(place)
        raise (ServerFault if reply.status < 500 else ConnectionError if reply.status == 503 else _Failed)(place)


class _Failed(RuntimeError):
    """A server that could not compute an answer."""


class _Later(RuntimeError):
    """A server that has no room now, or is given weights by another trainer."""


def _message(text: bytes) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")


def _parts_of(prompts: Sequence[list[int]], *, sampling: Sequence[SamplingParams], oldest: int) -> list[_Part]:
    """The rows in requests of one prompt each. oldest: number of the first version that may draw."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for row, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        groups.setdefault((tuple(prompt), own.max_tokens), []).append(row)
    return [
        _Part(
            rows=own,
            body=_body(prompt, sampling=[sampling[row] for row in own]),
            prefix=prompt[:_AFFINE],
            oldest=oldest,
            cuts=not cut_of(sampling[own[0]]).keeps_all,
        )
        for (prompt, _), rows in groups.items()
        for own in (rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS))
    ]


def _body(prompt: Sequence[int], *, sampling: Sequence[SamplingParams]) -> bytes:
    """A request for one answer per `sampling`, which differ in their keys alone. It has all fields that have defaults on the server."""
    one = sampling[0]
    fields = {
        "prompt": [list(prompt)] * len(sampling),
        "draw_keys": [own.draw_key for own in sampling],
        "max_tokens": one.max_tokens,
        "temperature": one.temperature,
        "seed": one.seed,
        "fp32_logprobs": one.fp32_logprobs,
        "stop_token_ids": list(one.stop_token_ids),
        "ignore_eos": True,
        "stop": [],
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
