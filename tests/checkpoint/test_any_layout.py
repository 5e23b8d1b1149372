"""A checkpoint does not depend on the layout: master weights and moments keep their bits through any chain of layouts."""

from tests.checkpoint.runs import Setup, reload, resume, train_and_save
from tests.zero.models import Layout

# (world size, setup): neighbours differ in several respects at once
CHAIN = [
    (2, Setup(layout=Layout(stage=0))),
    (4, Setup(layout=Layout(stage=3, offload="nvme"), dtype="bf16")),
    (1, Setup(layout=Layout(stage=0))),
    (2, Setup(layout=Layout(stage=1, offload="cpu"), dtype="fp16")),
    (4, Setup(layout=Layout(stage=2))),
    (2, Setup(layout=Layout(stage=3, offload="cpu", fraction=0.4, zero={"bucket_size": 500}))),
    (1, Setup(layout=Layout(stage=3, offload="nvme"), dtype="bf16")),
    (4, Setup(layout=Layout(stage=1, offload="nvme", fraction=0.7), dtype="bf16")),
    (2, Setup(layout=Layout(stage=2, offload="nvme"), dtype="fp16")),
    (1, Setup(layout=Layout(stage=2, offload="cpu"))),
    (4, Setup(layout=Layout(stage=0, offload="cpu"), dtype="bf16")),
    (2, Setup(layout=Layout(stage=3, zero={"bucket_size": 100_000, "param_persistence_threshold": 200}))),
    (4, Setup(layout=Layout(stage=3, offload="cpu"), dtype="fp16")),
    (1, Setup(layout=Layout(stage=1))),
    (2, Setup(layout=Layout(stage=0, offload="nvme"), dtype="bf16")),
]


def test_every_state_keeps_its_bits_through_fifteen_layouts(ranks, tmp_path):
    world, setup = CHAIN[0]
    first = ranks(world).run(train_and_save, setup=setup, folder=str(tmp_path / "0"), save_at=5, stop=5)[0]
    assert len({(world, setup.layout.id, setup.dtype) for world, setup in CHAIN}) >= 12
    for number, (world, setup) in enumerate(CHAIN[1:] + CHAIN[:1]):
        folder, onward = tmp_path / str(number), tmp_path / str(number + 1)
        for loaded in ranks(world).run(reload, setup=setup, folder=str(folder), to=str(onward)):
            assert loaded.states == first.states, (world, setup)
            if setup.dtype == "fp32":
                assert loaded.weights == first.weights, (world, setup)


def test_training_continues_identically_at_another_stage(ranks, tmp_path):
    """Stages and tiers do not change numbers, so on one world size the continuation is the same to the bit."""
    straight = ranks(2).run(train_and_save, setup=Setup(), folder=str(tmp_path), save_at=3, stop=6)
    tiers = Layout(stage=3, offload="nvme", fraction=0.3), Layout(stage=2, offload="cpu", fraction=0.8)
    for layout in (Layout(stage=3, offload="nvme"), Layout(stage=1), *tiers):
        assert ranks(2).run(resume, setup=Setup(layout=layout), folder=str(tmp_path), stop=6) == straight
    with_part = Setup(layout=tiers[0])
    assert ranks(2).run(train_and_save, setup=with_part, folder=str(tmp_path / "part"), save_at=3, stop=6) == straight
    again = Setup(layout=Layout(stage=1, offload="cpu", fraction=0.6))
    assert ranks(2).run(resume, setup=again, folder=str(tmp_path / "part"), stop=6) == straight
