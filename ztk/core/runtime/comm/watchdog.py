"""Detects ranks that wait in different collectives, for transports that cannot: gloo between machines, NCCL.

Every rank numbers its collectives and keeps their labels. Nothing is stored while no rank waits long.

[Note: Stalls] The first rank that waits long in a collective puts a request into the store. The other ranks look for one periodically, and
answer with a few of their labels: the last ones, and those up to the one they wait for. The rank that asked compares all answers. If two
labels of one number differ, it puts the error into its request, and all ranks raise it. A rank that is late, or whose process does not
answer, is reported once, because it may only be slow. So rank 0's store has under 2 KB per rank during a stall, and a look of all N ranks
takes about 4 N requests. If each rank read the labels of all others, it would be 2 N (N - 1): two million at 1,024 ranks.

On a GPU the host may be in a call that cannot be interrupted, so the process exits a few seconds after the error is found, unless the program
has exited by itself.
"""

import functools
import json
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ztk.core.policies.machine import place_of, ranks_text
from ztk.core.runtime.comm.errors import CommMismatch
from ztk.core.runtime.ending import end_with_process, forget, join_busy

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10.0
_REMEMBERED = 4096  # collectives: a GPU's host may run this far ahead of the device
_PUBLISHED = 8  # collectives before the oldest open one, and at the end: a source of a broadcast leaves it before the others enter it
_NAMED = 8  # late ranks in one line
_LOOKS = 4  # per patience

Labels = list[tuple[int, str]]  # numbers of collectives, and their labels


@dataclass(kw_only=True, slots=True)
class Entered:
    """A collective that this rank has started. since: start time, of `time.monotonic`."""

    number: int
    label: str
    since: float
    is_over: Callable[[], bool] | None = None  # set for non-blocking transports once the collective was issued


class Watchdog:
    """The watchdog of one communicator. `mismatch` is the error, once it is found."""

    def __init__(
        self, store: dist.Store, *, number: int, rank: int, ranks: Sequence[int], patience: float, ends_process: bool
    ) -> None:
        """number: number of the communicator, equal on all its ranks and different for those that have a rank in common.
        rank: this rank's place among `ranks`, the numbers of the communicator's ranks in the run.
        patience: seconds that a collective may take before labels are compared.
        """
        self.mismatch: CommMismatch | None = None
        self._store, self._rank, self._ranks, self._patience = store, rank, ranks, patience
        self._name = f"group {number} of {ranks_text(ranks)}"
        self._prefix = f"ztk/watchdog/{number}/{ranks[0]}"
        self._turn = ""  # of this rank's request
        self._asked = 0.0
        self._answered: list[Any] = []
        self._said = ""  # the last report of late ranks that this rank has logged
        self._ends_process = ends_process
        self._number, self._records = 0, False
        self._labels: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._open: deque[Entered] = deque()
        self._lock = threading.Lock()
        self._reported: set[tuple[int, int]] = set()  # (number, rank) already reported as late, by this rank's request
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ztk-watchdog", daemon=True)
        end_with_process(self._thread, end=functools.partial(_end, self._thread, self._ended))
        self._thread.start()

    def enter(self, label: str) -> Entered:
        """Records the start of a collective."""
        self._records = False
        with self._lock:
            self._forget_completed()
            self._number += 1
            entered = Entered(number=self._number, label=label, since=time.monotonic())
            self._labels.append((entered.number, label))
            self._open.append(entered)
        return entered

    def leave(self, entered: Entered, *, is_over: Callable[[], bool] | None = None) -> None:
        """Marks the collective as complete, or as running on the device until `is_over()` returns True. A later call replaces `is_over`."""
        with self._lock:
            if is_over is None:
                self._open.remove(entered)
            else:
                entered.is_over = is_over

    def pass_over(self) -> None:
        """Called when a collective becomes part of a CUDA graph. No event is queried until the next `enter`: a query would end the
        capture."""
        self._records = True

    def close(self) -> None:
        """Stops the thread. Idempotent."""
        self._ended.set()

    def _watch(self) -> None:
        try:
            self._look()
        finally:
            forget(threading.current_thread())

    def _look(self) -> None:
        with suppress(RuntimeError):  # the rank that served the store is gone; its end is the cause to show
            while not self._ended.wait(self._patience / _LOOKS):
                with self._lock:
                    self._forget_completed()
                    oldest = self._open[0] if self._open else None
                    labels = self._around(oldest)
                self._take_part(oldest, labels)
            self._withdraw()

    def _take_part(self, oldest: Entered | None, labels: Labels) -> None:
        """Asks, compares or answers. See [Note: Stalls]. oldest: the open collective."""
        waits = oldest is not None and time.monotonic() - oldest.since > self._patience
        turn = f"{self._rank}/{oldest.number}" if oldest is not None and waits else ""
        if self._turn != turn:
            self._withdraw()
        request = self._request()
        if turn and not request and self.mismatch is None:
            request = {"turn": turn, "late": "", "mismatch": ""}
            if self._store.compare_set(self._key("request"), "", json.dumps(request)) == json.dumps(request).encode():
                self._turn, self._asked = turn, time.monotonic()
                return
            request = self._request()
        if not request:
            return
        if request["turn"] == self._turn:
            assert oldest is not None
            self._compare(oldest, labels=labels, request=request)
        elif (answer := [request["turn"], labels]) != self._answered:
            self._store.set(self._key(self._rank), json.dumps(answer))
            self._answered = answer
        if waits and request["late"] not in ("", self._said):
            self._said = request["late"]
            logger.warning("%s: %s", self._name, self._said)
        if request["mismatch"] and self.mismatch is None:
            self.mismatch = CommMismatch(request["mismatch"])
            logger.error("%s", self.mismatch)
            if self._ends_process and not self._ended.wait(_GRACE_SECONDS):
                os._exit(1)

    def _request(self) -> dict[str, str]:
        """The request of the rank that asks. Empty if there is none."""
        key = self._key("request")
        return json.loads(self._store.get(key) or "{}") if self._store.check([key]) else {}

    def _withdraw(self) -> None:
        if self._turn:
            self._store.set(self._key("request"), "")  # not deleted: a rank may read it at this moment
            self._turn = ""

    def _around(self, oldest: Entered | None) -> Labels:
        """The last collectives, and those from shortly before the oldest open one on to it. The caller holds the lock."""
        labels = list(self._labels)
        if oldest is None or not labels:
            return labels[-_PUBLISHED:]
        place = oldest.number - labels[0][0]
        near = labels[max(0, place - _PUBLISHED) : max(0, place + 1)]
        return near + [each for each in labels[-_PUBLISHED:] if each[0] > oldest.number]

    def _forget_completed(self) -> None:
        """The caller holds the lock."""
        while not self._records and self._open and (is_over := self._open[0].is_over) is not None and is_over():
            self._open.popleft()

    def _compare(self, own: Entered, *, labels: Labels, request: dict[str, str]) -> None:
        """Adds a mismatch or late ranks to this rank's `request`."""
        answers = {self._rank: labels}
        for rank in range(len(self._ranks)):
            if rank != self._rank and self._store.check([self._key(rank)]):
                turn, theirs = json.loads(self._store.get(self._key(rank)))
                if turn == self._turn:
                    answers[rank] = [(number, label) for number, label in theirs]
        found = {"mismatch": self._mismatch_in(answers)}
        if not found["mismatch"] and (late := self._late_in(answers, own=own)):
            shown = "; ".join(late[:_NAMED]) + (f"; and {len(late) - _NAMED} more ranks" if len(late) > _NAMED else "")
            waited = time.monotonic() - own.since
            found["late"] = f"{self._place(self._rank)} has waited {waited:.0f} s at '{own.label}'; {shown}"
        if any(found.values()):
            request |= found
            self._store.set(self._key("request"), json.dumps(request))

    def _mismatch_in(self, answers: dict[int, Labels]) -> str:
        """Describes the first collective for which ranks have different labels, or returns ""."""
        ranks_at: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, labels in sorted(answers.items()):
            for number, label in labels:
                ranks_at[number][label].append(rank)
        different = [number for number, found in ranks_at.items() if len(found) > 1]
        if not different:
            return ""
        (label, ranks), (other_label, others) = list(ranks_at[min(different)].items())[:2]
        return (
            f"{self._name}: {self._place(ranks[0])}{_more(ranks)} is at '{label}', {self._place(others[0])}{_more(others)} at '{other_label}': "
            "the ranks ran different modules or shapes"
        )

    def _late_in(self, answers: dict[int, Labels], *, own: Entered) -> list[str]:
        """Describes each rank that has not entered the collective `own` and was not reported before."""
        late = []
        had_time = time.monotonic() - self._asked > self._patience * 3 / _LOOKS
        for rank in range(len(self._ranks)):
            number, label = (answers.get(rank) or [(0, "nothing")])[-1]
            if number >= own.number or (own.number, rank) in self._reported or not (rank in answers or had_time):
                continue
            self._reported.add((own.number, rank))
            is_silent = "does not answer: its process is stopped, or in a call that holds Python's lock"
            state = f"has not arrived yet and was last at '{label}'" if rank in answers else is_silent
            late.append(f"{self._place(rank)} {state}")
        return late

    def _place(self, rank: int) -> str:
        return place_of(self._ranks[rank])

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"


def _more(ranks: Sequence[int]) -> str:
    return f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    join_busy(thread)
