"""Ranks killed at random moments around saves; tests/slow/test_kill_checkpoints.py has more of them."""

from tests.slow.test_kill_checkpoints import kill_often


def test_kills_leave_a_complete_checkpoint(tmp_path):
    assert not kill_often(tmp_path, kills=6)
