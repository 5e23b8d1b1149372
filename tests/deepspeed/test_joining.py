"""Ranks that a script starts itself, and models that it has cut itself."""

import pytest
import torch

from tests.deepspeed import joined, scripts
from ztk.deepspeed import zero_to_fp32


def test_ranks_of_multiprocessing_spawn(tmp_path):
    context = {"start_method": "forkserver"}  # as spawn does, from a process that has imported torch already
    torch.multiprocessing.start_processes(joined.spawned, args=(str(tmp_path),), nprocs=2, **context)
    expected, _ = scripts.plain(steps=3)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["place"] == (rank, 2, rank, 2)
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected))


@pytest.mark.parametrize(("model_ranks", "stage"), [(1, 2), (2, 1), (2, 3)])
def test_a_model_cut_by_the_script(ranks, tmp_path, model_ranks, stage):
    expected, weights = scripts.plain(steps=5)
    for found in ranks(2).run(joined.with_mpu, model_ranks=model_ranks, stage=stage, folder=str(tmp_path)):
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected))
        assert found["ranks"] == (2 // model_ranks, model_ranks)
        assert "get_model_parallel_world_size" in found["errors"][0] and "side by side" in found["errors"][1]
    saved = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value)
