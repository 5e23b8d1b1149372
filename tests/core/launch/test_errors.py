"""The first of several failures, and its record."""

import pickle
import signal
import threading

import pytest
from torch.distributed import HashStore, TCPStore

from ztk.core.launch import RankError, earlier_cause, failure_of, failure_text, first_cause, read_failure, write_failure
from ztk.core.launch.errors import RankFailure, failure_of_exit
from ztk.core.runtime.rendezvous import Meeting, best_text


def failed(*, rank: int = 0, time: float = 0.0, secondary: bool = False) -> RankFailure:
    return RankFailure(rank=rank, kind="ValueError", message="boom", trace="", time=time, secondary=secondary)


def test_the_earliest_primary_failure_is_the_cause():
    failures = [failed(rank=0, time=1.0, secondary=True), failed(rank=1, time=3.0), failed(rank=2, time=2.0)]
    assert first_cause(failures).rank == 2
    assert first_cause(failures[:1]).rank == 0


class PeerLost(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error, secondary",
    [
        (PeerLost("rank 1 is gone"), True),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:9"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("Connection refused is no value"), False),
    ],
)
def test_the_loss_of_a_peer_is_secondary(error, secondary):
    assert failure_of(error, rank=0).secondary is secondary


@pytest.mark.parametrize(("hosts", "start"), [("a b", "rank 3 on a: "), ("a a", "rank 3: "), ("", "rank 3: ")])
def test_a_failure_names_its_host_if_the_run_has_several(hosts, start, monkeypatch, tmp_path):
    monkeypatch.setenv("ZTK_HOSTS", hosts)
    monkeypatch.setattr("platform.node", lambda: "a")
    write_failure(failure_of(ValueError("boom"), rank=3), output_dir=tmp_path)
    assert str(read_failure(tmp_path, rank=3)) == f"{start}ValueError: boom"


def test_a_failure_survives_its_file_and_a_pickle(tmp_path):
    try:
        raise ValueError("boom")
    except ValueError as error:
        failure = failure_of(error, rank=3)
    write_failure(failure, output_dir=tmp_path)
    assert read_failure(tmp_path, rank=3) == failure
    assert 'raise ValueError("boom")' in failure.trace
    assert read_failure(tmp_path, rank=0) is None
    error = pickle.loads(pickle.dumps(RankError(failure, log="a.log")))
    assert (str(error), error.log) == ("rank 3: ValueError: boom", "a.log")


def test_an_exit_without_an_error_is_described():
    assert str(failure_of_exit(-signal.SIGSEGV, rank=1, noticed=0.0)) == "rank 1 was killed by SIGSEGV"
    assert failure_of_exit(-signal.SIGABRT, rank=1, noticed=0.0).secondary


def test_the_first_cause_of_many_ranks_is_one_key_of_the_store():
    """Each rank makes a few requests, where it read the files of all ranks."""
    store, compared = HashStore(), []
    meeting = Meeting(generation="g", text="", hosts=("a",) * 64, store=store)
    failures = [failure_of(PeerLost("rank 9 is gone"), rank=rank) for rank in range(64)]
    failures[9] = failure_of(ValueError("boom"), rank=9)
    found = {}

    def choose(text: str, other: str) -> str:
        compared.append(text)
        return earlier_cause(text, other)

    def fail(rank: int) -> None:
        found[rank] = best_text(meeting, own=failure_text(failures[rank]), choose=choose)

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert best_text(meeting, own=failure_text(failures[3]), choose=earlier_cause) == failure_text(failures[9])
    assert found[9] == failure_text(failures[9])
    assert store.num_keys() == 1
    assert len(compared) <= 4 * 64  # a comparison for each request but the first


def test_a_store_that_is_gone_gives_no_cause():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    meeting = Meeting(generation="g", text="", hosts=("a", "b"), store=client)
    del server
    assert best_text(meeting, own="{}", choose=earlier_cause) is None
