"""An exponential moving average of the weights: the same bits at every stage and tier, and no trace of it in the training."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.runs import canonical, digest, full_weights
from tests.ranks import RankFailed
from tests.zero.models import Layout, batches, build, make_engine
from ztk.checkpoint import CheckpointError, load, save
from ztk.checkpoint.export import export_state_dict
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.offload import PAGE_BYTES
from ztk.core.runtime import Process, Tier
from ztk.optim import OptimizerPolicy
from ztk.optim.ema import ELEMENTS, update_average
from ztk.parallel.apply import parallelize
from ztk.train.engine import Engine

EMA = EmaPolicy(decay=0.9)
FIRST = Layout(stage=0)  # the layout of the plain recurrence
MIXED = [Layout(stage=1, offload="cpu"), Layout(stage=3), Layout(stage=3, offload="nvme", parameters="none")]
TIERS = ("none", "cpu", "nvme")
EVERY = [Layout(stage=stage, offload=TIERS[(stage + 1) % 3]) for stage in range(3)]
EVERY += [Layout(stage=3, offload=tier) for tier in TIERS] + [Layout(stage=3, offload="nvme", parameters="cpu")]


def make(process: Process, *, layout: Layout, frozen: tuple[str, ...] = (), **options) -> Engine:
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return make_engine(process, layout=layout, model=model, **options)


def train(engine: Engine, *, start: int, stop: int) -> None:
    for number in range(start, stop):
        tokens = list(batches(number + 1, rank=engine.process.rank, world=engine.process.world_size))[-1]
        engine.backward(engine(tokens, use_all=number % 3 != 1))
        engine.step()


def of_kind(engine: Engine, kind: str) -> dict[str, torch.Tensor]:
    """Full fp32 states by name."""
    return {name: value.clone() for (of, name), value in canonical(engine).items() if of == kind}


def bits(engine: Engine) -> tuple[str, str, str]:
    """Of the average, of the other states, of the weights that the model computes with."""
    states = canonical(engine)
    average = {key: value for key, value in states.items() if key[0] == "ema"}
    rest = {key: value for key, value in states.items() if key[0] != "ema"}
    return digest(average), digest(rest), full_weights(engine)


def averages_plainly(process: Process, *, ema: EmaPolicy, steps: int, **options) -> tuple[bool, int]:
    """Whether the average is the one of plain torch, each operation rounded to fp32; and the skipped steps."""
    engine, skipped = make(process, layout=FIRST, ema=ema, **options), 0
    average = of_kind(engine, "master")
    for number in range(steps):
        train(engine, start=number, stop=number + 1)
        before, skipped = skipped, engine.read_metrics().skipped_total
        if skipped == before and (number + 1) % ema.every == 0:
            weights = of_kind(engine, "master")
            average = {name: old + (weights[name] - old) * (1 - ema.decay) for name, old in average.items()}
    own = of_kind(engine, "ema")
    return own.keys() == average.keys() and all(torch.equal(own[name], average[name]) for name in own), skipped


def train_all(process: Process, *, layouts: list[Layout], steps: int, **options) -> list[tuple[str, str, str]]:
    found = []
    for layout in layouts:
        engine = make(process, layout=layout, **options)
        train(engine, start=0, stop=steps)
        found.append(bits(engine))
        engine.close()
    return found


CASES = {
    "fp32": (EVERY, {"dtype": "fp32"}),
    "bf16": (MIXED, {"dtype": "bf16"}),
    "fp16, skipped steps": (MIXED, {"dtype": "fp16"}),
    "muon": (MIXED, {"optimizer": OptimizerPolicy(name="muon", lr=1e-2, adam_lr=1e-2)}),
    "every second step, frozen parameters, an optimizer without states": (
        MIXED,
        {
            "ema": EmaPolicy(decay=0.9, every=2),
            "frozen": ("embedding.weight", "blocks.0.up.weight"),
            "optimizer": OptimizerPolicy(name="sgd", lr=0.1),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_average_is_the_plain_one_at_every_stage_and_tier_and_training_keeps_its_bits(ranks, case):
    layouts, options = CASES[case]
    ema, steps = options.get("ema", EMA), 9 if options.get("dtype") == "fp16" else 4
    given = {name: value for name, value in options.items() if name != "ema"}
    for is_plain, skipped in ranks(2).run(averages_plainly, ema=ema, steps=steps, **given):
        assert is_plain
        assert 0 < skipped < steps if options.get("dtype") == "fp16" else skipped == 0, skipped
    without = ranks(2).run(train_all, layouts=[FIRST], steps=steps, **given)[0][0]
    for found in ranks(2).run(train_all, layouts=[FIRST, *layouts], steps=steps, ema=ema, **given):
        assert found[0][0] != without[0]
        for layout, (average, *trained) in zip([FIRST, *layouts], found, strict=True):
            assert average == found[0][0], layout.id
            assert tuple(trained) == without[1:], layout.id


# The average on another tier than the optimizer's states, at every stage.
APART = [
    (Layout(stage=0), "cpu"),
    (Layout(stage=1, offload="cpu"), "nvme"),
    (Layout(stage=2, offload="nvme"), "none"),
    (Layout(stage=3), "nvme"),
    (Layout(stage=3, offload="nvme"), "cpu"),
]


def train_apart(process: Process, *, count: int, dtype: str, steps: int) -> list[tuple]:
    """This rank's digest, and its bytes of averages by tier, in the first layouts."""
    found = []
    for layout, tier in APART[:count]:
        engine = make(process, layout=layout, dtype=dtype, ema=EmaPolicy(decay=0.9, offload=tier))
        train(engine, start=0, stop=steps)
        sizes = {str(on): engine.memory.by_category(on).get("average", 0) for on in Tier}
        with engine.averaged():
            average = full_weights(engine)
        pieces = [piece.numel for bucket in engine.zero.buckets for piece in bucket.pieces]
        found.append((bits(engine), average, sizes, 4 * sum(pieces), len(pieces)))
        engine.close()
    return found


def train_beside(process: Process, *, dtype: str, steps: int) -> tuple:
    """The same with the average among the optimizer's states."""
    engine = make(process, layout=FIRST, dtype=dtype, ema=EMA)
    train(engine, start=0, stop=steps)
    with engine.averaged():
        average = full_weights(engine)
    assert engine.memory.by_category(Tier.device).get("average") is None
    return bits(engine), average


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])  # fp16: with skipped steps
def test_a_tier_of_its_own_changes_no_bit_and_has_the_bytes(ranks, dtype):
    steps, count = (5, 2) if dtype == "fp16" else (2, len(APART))
    expected = ranks(2).run(train_beside, dtype=dtype, steps=steps)[0]
    for own in ranks(2).run(train_apart, count=count, dtype=dtype, steps=steps):
        for (layout, tier), (found, average, sizes, nbytes, pieces) in zip(APART[:count], own, strict=True):
            assert (found, average) == expected, (layout.id, tier)
            most = nbytes + (PAGE_BYTES * pieces if tier == "nvme" else 0)  # files have full pages
            assert nbytes <= sizes.pop(tier) <= most and not any(sizes.values()), (layout.id, tier, sizes)


def test_a_tier_without_a_folder_and_one_that_is_none_are_refused(ranks):
    with pytest.raises(ValueError, match="ema.offload=disk: must be one of none, cpu, nvme"):
        EmaPolicy(offload="disk")
    with pytest.raises(RankFailed, match=r"ema.offload=nvme needs a folder: set offload.nvme_path=FOLDER"):
        ranks(1).run(make_without_folder)


def make_without_folder(process: Process) -> None:
    parallelize(build(), process=process, optimizer=OptimizerPolicy(), ema=EmaPolicy(offload="nvme"))


def shown(process: Process, *, layouts: list[Layout], dtype: str, folder: str) -> None:
    for layout in layouts:
        engine = make(process, layout=layout, dtype=dtype, ema=EMA)
        train(engine, start=0, stop=2)
        before, average = bits(engine), of_kind(engine, "ema")
        with pytest.raises(ZeroDivisionError), engine.averaged(), engine.evaluating():
            for name, value in engine.zero.full_parameters():
                assert torch.equal(value.cpu().flatten(), average[name].to(value.dtype)), (layout.id, name)
            assert engine(next(iter(batches(1, rank=process.rank, world=process.world_size)))).isfinite()
            with pytest.raises(RuntimeError, match="a checkpoint inside"):
                save(engine, folder=folder)
            with pytest.raises(RuntimeError, match="already"), engine.averaged():
                pass
            with pytest.raises(RuntimeError, match="a step inside"):
                engine.zero.update(engine.control.control, step=1)
            raise ZeroDivisionError
        assert bits(engine) == before, layout.id
        engine.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_average_in_the_place_of_the_weights_and_back(ranks, dtype, tmp_path):
    layouts = [FIRST, *MIXED, Layout(stage=2), Layout(stage=3, offload="cpu")]
    ranks(2).run(shown, layouts=layouts, dtype=dtype, folder=str(tmp_path))


def save_at(process: Process, *, layout: Layout, folder: str, ema: EmaPolicy | None, stop: int) -> tuple[str, str, str]:
    """Saves after two steps; the bits after `stop`."""
    engine = make(process, layout=layout, ema=ema)
    train(engine, start=0, stop=2)
    save(engine, folder=folder)
    train(engine, start=2, stop=stop)
    return bits(engine)


def resume(process: Process, *, layout: Layout, folder: str, ema: EmaPolicy | None, stop: int, **options):
    """(bits after `stop`, the report's notes, whether the average began as the weights)"""
    engine = make(process, layout=layout, ema=ema)
    report = load(engine, path=folder, **options)
    average, weights = of_kind(engine, "ema"), of_kind(engine, "master")
    is_copy = average.keys() == weights.keys() and all(torch.equal(average[name], weights[name]) for name in average)
    train(engine, start=2, stop=stop)
    return bits(engine), report.notes, is_copy


def average_at(process: Process, *, layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    """Loads, and returns the average in full."""
    engine = make(process, layout=layout, ema=EMA)
    load(engine, path=folder)
    return of_kind(engine, "ema")


def test_a_resumed_run_continues_the_average_at_any_layout(ranks, tmp_path):
    straight = ranks(2).run(save_at, layout=FIRST, folder=str(tmp_path), ema=EMA, stop=4)
    apart = [(layout, EmaPolicy(decay=0.9, offload=tier)) for layout, tier in APART[1::2]]
    for layout, ema in [*((layout, EMA) for layout in MIXED), *apart]:
        again = ranks(2).run(resume, layout=layout, folder=str(tmp_path), ema=ema, stop=4)
        assert again == [(found, (), False) for found in straight], layout.id
    for layout, ema in apart:  # and saved by such a run
        assert ranks(2).run(save_at, layout=layout, folder=str(tmp_path / ema.offload), ema=ema, stop=4) == straight
        again = ranks(2).run(resume, layout=MIXED[1], folder=str(tmp_path / ema.offload), ema=EMA, stop=4)
        assert again == [(found, (), False) for found in straight], layout.id
    export_state_dict(tmp_path, to=tmp_path / "average.pt", ema=True)
    exported = torch.load(tmp_path / "average.pt")
    saved = ranks(2).run(average_at, layout=MIXED[1], folder=str(tmp_path))[0]
    assert saved.keys() <= exported.keys() and all(torch.equal(exported[n].flatten(), saved[n]) for n in saved)
    saved = ranks(2).run(resume, layout=FIRST, folder=str(tmp_path), ema=EMA, stop=2)[0]
    for layout in (Layout(stage=2, offload="nvme"), Layout(stage=3, offload="cpu")):
        for found in ranks(4).run(resume, layout=layout, folder=str(tmp_path), ema=EMA, stop=2):
            assert found == saved, layout.id


def test_a_run_may_begin_or_end_to_average_at_a_checkpoint(ranks, tmp_path):
    own, plain = str(tmp_path / "with"), str(tmp_path / "without")
    for folder, ema in ((own, EMA), (plain, None)):
        ranks(2).run(save_at, layout=FIRST, folder=folder, ema=ema, stop=2)
    arguments = {"layout": Layout(stage=3, offload="cpu"), "stop": 2}
    (_, notes, is_copy), *_ = ranks(2).run(resume, folder=plain, ema=EMA, **arguments)
    assert is_copy and "starts from the weights" in notes[0]
    (_, notes, is_copy), *_ = ranks(2).run(resume, folder=own, ema=EMA, weights_only=True, **arguments)
    assert is_copy and "starts from the weights" in notes[0]
    found, notes, _ = ranks(2).run(resume, folder=own, ema=None, **arguments)[0]
    assert found == ranks(2).run(resume, folder=plain, ema=None, **arguments)[0][0]
    assert "is left out" in notes[0]
    with pytest.raises(CheckpointError, match="no average"):
        export_state_dict(plain, to=tmp_path / "none.pt", ema=True)


def test_an_update_does_not_depend_on_where_a_buffer_is_cut_and_a_skipped_one_changes_no_bit():
    torch.manual_seed(0)
    weights, average = torch.randn(ELEMENTS + 37), torch.randn(ELEMENTS + 37)
    average[:2] = torch.tensor([-0.0, 0.0])
    full, parts, kept = average.clone(), average.clone(), average.clone()
    update_average(full, weights=weights, decay=0.999)
    for start in range(0, len(parts), 100_003):
        update_average(parts[start : start + 100_003], weights=weights[start : start + 100_003], decay=0.999)
    assert torch.equal(full, parts) and not torch.equal(full, average)
    update_average(kept, weights=weights, decay=0.999, skip=torch.tensor(1.0))
    assert torch.equal(kept.view(torch.int32), average.view(torch.int32))
    update_average(kept, weights=weights, decay=0.999, skip=torch.tensor(0.0))
    assert torch.equal(kept, full)


def test_an_average_on_a_gpu_takes_few_launches():
    """One billion weights: 15 parts of 2^26, three operations each."""

    class Counts(TorchDispatchMode):
        launches = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.launches += not func.is_view and "split" not in func.name()
            return func(*args, **(kwargs or {}))

    weights, average = (torch.empty(10**9, device="meta") for _ in range(2))
    with Counts() as counts:
        update_average(average, weights=weights, decay=0.999)
    assert counts.launches == 45


def train_one(process: Process) -> str:
    engine = make(process, layout=FIRST)
    with pytest.raises(RuntimeError, match=r"ema=EmaPolicy"), engine.averaged():
        pass
    return "refused"


def test_an_engine_without_an_average_says_so(ranks):
    assert ranks(2).run(train_one) == ["refused"] * 2
