"""Servers that compute for a run: asked by load, given the newest weights, and replaced by each other when one is gone.

A result depends on the weights and on the work alone, so any server may compute it, and two may be asked. A server has a thread, its
keeper, that sends it the newest weights whenever it has others: after an update, a loss or a restart.
"""

import http.client
import itertools
import socket
import threading
import time
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ztk.inference import Completion
from ztk.rl.rollout.clients import PROBE_SECONDS, Client, Failed, Later, ServerFault, Weights

_MOST = 64  # results that are under way at one server, except for a single request
_AHEAD = 32  # results that a server of the same home may have under way above the least loaded one
_BEAT_SECONDS = 0.2  # between looks at a server that lacks the newest weights
_LOOK_SECONDS = 2.0  # between looks at one that had them
_SLOWER, _FIRST_SECONDS = (
    3.0,
    30.0,
)  # a request this many times as old as the slowest before, or so old, is also sent elsewhere
_TRIES = 3  # failures of a server to compute one piece of work, before they end the run


class ServersLost(RuntimeError):
    """No server of a fleet answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A request. given: the client's argument. size: number of results. home: work with the same value goes to the same server."""

    given: Any
    size: int
    home: Hashable = None


@dataclass(kw_only=True, eq=False)
class _Server:
    """version: name of its weights, or None if it is unknown or the server is gone. rows: under way. error: the last one.

    answers, tokens: numbers of those that counted. seconds: sum over their requests. failures: requests without an answer.
    """

    client: Client
    version: str | None = None
    rows: int = 0
    error: str = "it has not answered yet"
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0
    failures: int = 0

    @property
    def url(self) -> str:
        return self.client.channel.url


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
    """A piece of work. oldest: number of the first version that may compute it. asked: requests for it that are under way."""

    work: Work
    oldest: int
    found: Sequence[Any] | None = None
    asked: list[_Asked] = field(default_factory=list)
    failures: int = 0


class Fleet:
    """The servers of a run, of one kind. `compute` may be called in several threads; servers with room serve earlier calls first.

    key: names the servers in errors. wait_key: names `patience_seconds`, the time without a server that answers after which a call ends.
    sends: gives servers the newest weights; on one rank. The others wait for that.
    """

    def __init__(
        self, clients: Sequence[Client], *, sends: bool, patience_seconds: float, key: str, wait_key: str
    ) -> None:
        self._servers = [_Server(client=client) for client in clients]
        self._sends, self._patience, self._key, self._wait_key = sends, patience_seconds, key, wait_key
        self._changed = threading.Condition()
        self._version: str | None = None
        self._numbers = dict[str, int]()  # of all versions so far, in order
        self._under_way = dict[int, list[_Part]]()  # by the number of their call
        self._calls = itertools.count()
        self._heard = 0.0  # time of the latest answer, or of a call without others
        self._weights: Weights | None = None
        self._fault: Exception | None = None
        self._homes: dict[Hashable, _Server] = {}
        self._slowest = 0.0
        self._closed = False
        self._keepers = [
            threading.Thread(target=self._keep, args=(server,), name="ztk-keeper", daemon=True)
            for server in self._servers
        ]
        for keeper in self._keepers:
            keeper.start()

    def publish(self, version: str, *, weights: Weights | None) -> None:
        """Computes with these weights from now on, and goes on with them where answers have begun. weights: on the rank that sends. They are
        there until the next call.
        """
        with self._changed:
            self._version, self._weights = version, weights
            self._numbers.setdefault(version, len(self._numbers))
            self._changed.notify_all()

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that were sent so far, over all servers."""
        return sum(server.client.sent_bytes for server in self._servers)

    def describe(self) -> str:
        """A line per server about the requests of this rank: a slow one has more seconds per request."""
        lines = []
        for one in self._servers:
            each = one.seconds / max(1, one.requests)
            sent = f", {one.client.sent_bytes / 2**20:.1f} MiB of weights" if self._sends else ""
            tokens = f", {one.tokens} tokens" if one.tokens else ""
            lines.append(
                f"{one.url}: {one.answers} answers{tokens}, {each:.3f} s per request, {one.failures} failed{sent}"
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Ends the threads of the servers. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for keeper in self._keepers:
            keeper.join(timeout=PROBE_SECONDS)

    def compute(self, works: Sequence[Work], *, oldest: str | None = None) -> list[Sequence[Any]]:
        """Returns the results of each piece of work. oldest: first of the versions that may compute it, by default the newest one.

        Raises:
            ServersLost: no server has answered for the time of `patience_seconds`.
            ServerFault: a server refuses a request, or has another model.
        """
        call = next(self._calls)
        with self._changed:
            first = len(self._numbers) - 1 if oldest is None else self._numbers[oldest]
            parts = [_Part(work=work, oldest=first) for work in works]
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
        return [part.found for part in parts if part.found is not None]

    def _lost(self) -> str:
        states = "; ".join(f"{server.url}: {server.error}" for server in self._servers)
        return (
            f"{self._key}: none has answered for {self._patience:g} s ({states}); start them again and resume the run, or raise "
            f"{self._wait_key}"
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
        late = min(late, self._patience / 4)  # the first server that is ready may be the one that hangs
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
        """The least loaded server, or the one that has computed for the same home if it is about as loaded."""
        ready = [one for one in self._ready(part) if not one.rows or one.rows + part.work.size <= _MOST]
        if not ready:
            return None
        least = min(ready, key=lambda one: one.rows)
        home = self._homes.get(part.work.home)
        return home if home in ready and home.rows <= least.rows + _AHEAD else least

    def _ask(self, part: _Part, *, server: _Server) -> None:
        assert server.version is not None, "it is ready"
        try:
            connection = server.client.channel.connect()
        except ConnectionError as error:  # it has no address now
            server.version, server.error = None, str(error)
            return
        if len(self._homes) > 1 << 16:
            self._homes.clear()
        if part.work.home is not None:
            self._homes[part.work.home] = server
        server.rows += part.work.size
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
            asked.server.rows -= asked.part.work.size

    # Threads of requests

    def _wait_for(self, asked: _Asked) -> None:
        part = asked.part
        error: Exception | None = None
        found: Sequence[Any] = ()
        try:
            reply = asked.server.client.answer(part.work.given, version=asked.version, connection=asked.connection)
            self._check(reply.versions, part=part)
            found = reply.results
        except Exception as own:  # noqa: BLE001 - any fault is its server's
            error = own
            if isinstance(own, Later):
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
                server.tokens += sum(len(one.tokens) for one in found if isinstance(one, Completion))
                for other in list(part.asked):
                    self._hang_up(other)
            elif is_needed and error is not None:
                self._fail(asked, error=error)
            self._changed.notify_all()

    def _check(self, versions: Collection[str], *, part: _Part) -> None:
        """Raises ConnectionError for other weights than may compute."""
        with self._changed:
            for version in versions:
                if self._number_of(version) < part.oldest:
                    raise ConnectionError(
                        f"an answer was drawn with the weights {version}, which are none of this run's, or too old"
                    )

    def _fail(self, asked: _Asked, *, error: Exception) -> None:
        server, part = asked.server, asked.part
        server.failures += 1
        if isinstance(error, ServerFault):
            self._fault = error
        if isinstance(error, Failed):
            part.failures += 1
            if part.failures >= _TRIES:
                self._fault = ServerFault(f"{self._key}: {server.url} cannot compute: {error}")
        if isinstance(error, Later):
            return
        if server.version == asked.version:  # else it has newer weights already
            server.version = None
        server.error = f"{type(error).__name__}: {error}"

    # Threads of servers

    def _keep(self, server: _Server) -> None:
        while True:
            with self._changed:
                self._wait_until_due(server)
                if self._closed:
                    return
                version, weights = self._version, self._weights
            assert version is not None, "one was published"
            try:
                has = server.client.look()
                if has != version and self._sends:
                    assert weights is not None, "the rank that sends has them"
                    self._forget(server, version=version)
                    server.client.send(version=version, weights=weights)
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
                self._forget(server, version=version)
            with self._changed:
                if has == version:
                    server.version = version
                    self._changed.notify_all()
                elif not self._closed:
                    self._changed.wait(_BEAT_SECONDS)

    def _wait_until_due(self, server: _Server) -> None:
        """Waits until the server needs a look. The caller holds the lock.

        The rank that sends also looks at servers with the newest weights: one that restarts may fail the requests of other ranks alone.
        """
        until = time.monotonic() + _LOOK_SECONDS
        while not self._closed and (self._version is None or server.version == self._version):
            if self._version is None or not self._sends:
                self._changed.wait()
            elif (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            else:
                return

    def _forget(self, server: _Server, *, version: str) -> None:
        """Asks the server no more, unless it has other weights than this version by now."""
        with self._changed:
            if server.version == version:
                server.version = None
