"""Whether a gather starts at once must not depend on how far this rank's update has come: ranks see that at different times."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from ztk.runtime import Tier
from ztk.zero.bucket import Bucket, _ShardFetch


def bucket(updated: Future | None) -> SimpleNamespace:
    made = SimpleNamespace(updated=updated, parameter_store=SimpleNamespace(tier=Tier.device), fetch_shard=list)
    made.wait_for_update = lambda: Bucket.wait_for_update(made)
    return made


@pytest.mark.parametrize("done", [False, True])
def test_an_update_behind_the_forward_defers_the_gather_whether_done_or_not(done):
    updated = Future()
    if done:
        updated.set_result(None)
    assert not _ShardFetch(bucket(updated)).is_immediate


def test_without_an_update_it_starts_at_once():
    assert _ShardFetch(bucket(None)).is_immediate
