"""A checkpoint of a pipeline is one of the model: saved on one layout it goes on on any other."""

from dataclasses import replace
from pathlib import Path

import torch

from tests.parallel.pipeline.models import DECODER, Layout, build_engine, decoder, micro_batches
from ztk import checkpoint
from ztk.core.runtime import Topology

TWO, FOUR = Topology(pipeline=2), Topology(pipeline=4)


def go(process, *, layout: Layout, steps: range, folder: str | None = None, resume: str | None = None) -> list[float]:
    """Trains the steps, from the checkpoint `resume` on and into the folder `folder`, if given."""
    model, more = decoder(replace(DECODER, tie_embeddings=layout.tied))
    engine = build_engine(process, layout=layout, model=model, **more)
    mesh = engine.process.mesh
    if resume is not None:
        loaded = checkpoint.load(engine, path=resume)
        assert loaded.step == steps.start
    losses = [
        float(engine.train_batch(micro_batches(step, replica=mesh.replica, replicas=mesh.replicas))) for step in steps
    ]
    if folder is not None:
        checkpoint.Saver(engine, folder=folder).save()
    engine.close()
    if layout.topology != Topology():
        mesh.close()
    return losses


def test_any_layout_goes_on_from_any_other(ranks, tmp_path):
    """With a tied head: two stages hold a copy, the checkpoint one."""
    tied = True
    expected = ranks(1).run(go, layout=Layout(tied=tied), steps=range(4))[0][2:]
    saved, again = str(tmp_path / "saved"), str(tmp_path / "again")
    zero_bubble = Layout(topology=TWO, schedule="zero_bubble", stage=3, tied=tied)  # two replicas
    ranks(4).run(go, layout=zero_bubble, steps=range(2), folder=saved)
    newest = str(checkpoint.resolve(Path(saved)))
    for world, layout in (
        (1, Layout(tied=tied)),
        (2, Layout(topology=TWO, schedule="interleaved", virtual_stages=2, tied=tied)),
        (4, Layout(topology=FOUR, stage=2, tied=tied)),
    ):
        runs = ranks(world).run(go, layout=layout, steps=range(2, 4), resume=newest)
        losses = torch.tensor(runs).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0)
    ranks(1).run(go, layout=Layout(tied=tied), steps=range(2), folder=again)
    runs = ranks(2).run(
        go, layout=Layout(topology=TWO, tied=tied), steps=range(2, 4), resume=str(checkpoint.resolve(Path(again)))
    )
    torch.testing.assert_close(torch.tensor(runs).mean(0), torch.tensor(expected), rtol=1e-5, atol=0)
