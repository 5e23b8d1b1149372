"""Checkpoints that DeepSpeed 0.19.8 wrote (`make_deepspeed.py`) continue in ztk, on another number of ranks, with DeepSpeed's losses."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.deepspeed_model import ALL_STEPS, SAVED_STEPS, TinyModel, tokens_of
from tests.zero.models import Layout, make_engine
from ztk.checkpoint import CheckpointError, load, read_manifest
from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.deepspeed import DeepSpeedSource
from ztk.checkpoint.verify import verify
from ztk.optim import OptimizerPolicy

DATA = Path(__file__).parent / "data" / "deepspeed"
STAGES = [1, 2, 3]


def go_on(process, *, folder: str, layout: Layout) -> list[float]:
    """Losses of the steps after the save."""
    torch.manual_seed(3)
    policy = OptimizerPolicy(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, clip_grad_norm=1.0)  # DeepSpeed clips at 1
    engine = make_engine(process, layout=layout, model=TinyModel(), optimizer=policy)
    assert load(engine, path=folder).step == SAVED_STEPS
    losses = []
    for step in range(SAVED_STEPS, ALL_STEPS):
        loss = engine(tokens_of(step).chunk(process.world_size)[process.rank])
        engine.backward(loss)
        engine.step()
        losses.append(float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_training_continues_with_the_same_losses(ranks, tmp_path, stage):
    step = import_checkpoint(DATA / f"stage{stage}", to=tmp_path)
    manifest = read_manifest(step)
    assert (
        not verify(step).faults and manifest.state_names == ["exp_avg", "exp_avg_sq"] and manifest.step == SAVED_STEPS
    )
    expected = torch.tensor(json.loads((DATA / f"stage{stage}" / "losses.json").read_text())[SAVED_STEPS:])
    for world, layout in ((1, Layout()), (2, Layout(stage=3, offload="nvme")), (4, Layout(stage=2, offload="cpu"))):
        losses = torch.tensor(ranks(world).run(go_on, folder=str(tmp_path), layout=layout)[0])
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


def test_the_stages_hold_the_same_values(tmp_path):
    sources = [DeepSpeedSource(DATA / f"stage{stage}") for stage in STAGES]
    for key in sources[0].shapes():
        values = [torch.cat(list(source.ranges(key))) for source in sources]
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("fault", ["missing rank", "cut", "latest", "empty latest"])
def test_a_damaged_one_is_named(tmp_path, fault):
    folder = Path(shutil.copytree(DATA / "stage2", tmp_path / "stage2"))
    victim = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    match fault:
        case "missing rank":
            victim.unlink()
            expected = "saved by 2 ranks and has 1"
        case "cut":
            victim.write_bytes(victim.read_bytes()[:2000])
            expected = victim.name
        case "latest":
            (folder / "latest").write_text("global_step9")
            expected = "global_step9.*still usable in .*: global_step3"
        case "empty latest":
            (folder / "latest").write_text("")
            expected = "latest is empty; still usable in .*: global_step3"
    with pytest.raises(CheckpointError, match=expected):
        import_checkpoint(folder, to=tmp_path / "in")
