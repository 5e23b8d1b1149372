"""The first of several failures, and its record."""

import pickle
import signal

import pytest

from ztk.core.launch import RankError, failure_of, first_cause, read_failure, write_failure
from ztk.core.launch.errors import RankFailure, failure_of_exit


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
