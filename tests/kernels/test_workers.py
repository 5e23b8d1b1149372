"""Updates in main memory run in workers that have no team of threads."""

import os
import threading

import pytest
import torch

from ztk.kernels.ops.adamw_8bit import SPEC as EIGHT
from ztk.kernels.ops.adamw_bf16 import SPEC as HALF
from ztk.kernels.ops.adamw_stochastic import SPEC as STOCHASTIC
from ztk.kernels.shared import workers
from ztk.kernels.shared.cpu import GRAIN, UPDATE_PIECE
from ztk.kernels.shared.workers import KEPT_CORES, in_parts

N = 3 * UPDATE_PIECE + 4096 + 48


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    monkeypatch.setattr(workers, "FROM", GRAIN + 1)  # short tests
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def seen_by(numel, **options):
    """The cuts of a call, and the threads that ran them with the size of their teams."""
    cuts, threads, lock = [], set(), threading.Lock()

    def update(cut):
        with lock:
            cuts.append(cut)
            threads.add((threading.get_ident(), torch.get_num_threads()))

    in_parts(numel, update, **options)
    return sorted(cuts, key=lambda cut: cut.start), threads


@pytest.mark.parametrize("numel", [0, 1, 16, GRAIN, GRAIN + 1, 5 * GRAIN, UPDATE_PIECE, N, 9 * UPDATE_PIECE])
@pytest.mark.parametrize("longest", [1 << 16, UPDATE_PIECE])
def test_parts_are_the_whole_and_begin_at_full_vectors(numel, longest):
    cuts, _ = seen_by(numel, longest=longest)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts)][: len(cuts)]
    assert not cuts or cuts[-1].stop == numel
    assert all(cut.start % 4096 == 0 and 0 < cut.stop - cut.start <= longest for cut in cuts)
    if numel > 4 * longest:
        assert len(cuts) % 4 == 0 or len(cuts) == -(-numel // 4096)


def test_small_updates_stay_with_the_caller_and_its_team(monkeypatch):
    monkeypatch.undo()
    _, threads = seen_by(workers.FROM - 1)
    assert threads == {(threading.get_ident(), 4)}
    _, threads = seen_by(workers.FROM)
    assert {teams for _, teams in threads} == {1}


def test_workers_have_no_team_and_leave_others_theirs(monkeypatch):
    monkeypatch.setattr(workers, "_team", workers._Team())  # whose threads start here
    _, threads = seen_by(N)
    assert threads and {teams for _, teams in threads} == {1}
    assert threading.get_ident() not in {name for name, _ in threads}
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [4, 4]


def test_a_rank_with_a_gpu_keeps_two_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    together, most, lock = threading.Barrier(4 - KEPT_CORES), [], threading.Lock()

    def update(cut):
        together.wait(60)  # so many run at the same time, and with one more the last would wait in vain
        with lock:
            most.append(threading.get_ident())

    in_parts(2 * (4 - KEPT_CORES) * GRAIN, update, longest=GRAIN)
    assert len(set(most)) == 4 - KEPT_CORES == 2


def test_an_error_reaches_the_caller_and_the_next_call_works():
    started = []

    def fails(cut):
        started.append(cut)
        raise KeyError(cut.start)

    with pytest.raises(KeyError):
        in_parts(64 * UPDATE_PIECE, fails)
    assert len(started) <= 4
    cuts, _ = seen_by(N)
    assert cuts[-1].stop == N


def test_a_forked_child_starts_its_own_workers():
    seen_by(N)
    child = os.fork()
    if child == 0:
        cuts, _ = seen_by(N)
        os._exit(0 if cuts[-1].stop == N else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("spec", [HALF, STOCHASTIC, EIGHT], ids=lambda spec: spec.name)
def test_threads_do_not_change_bits_of_narrow_states(spec):
    """With random roundings, which depend on an element's position."""
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        inputs = spec.make_inputs((5 * (1 << 16) + 4096 + 32,), dtype=torch.bfloat16, device="cpu")
        spec.op(**inputs)
        results.append({name: inputs[name] for name in spec.mutated if inputs.get(name) is not None})
    for other in results[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in results[0].items())
