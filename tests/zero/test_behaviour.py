"""Common uses of a model: accumulating, freezing, recomputing, leaving modules out, evaluating in between."""

import functools
import os
import time

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankFailed, RankPool
from tests.rounding import Bounds
from tests.zero.models import CLASSES, WIDTH, Layout, Model, batches, build, make_engine, train
from ztk.optim import OptimizerPolicy
from ztk.zero.buckets.layout import SHARD_ALIGNMENT
from ztk.zero.buckets.residency import ParameterState
from ztk.zero.parameters.released import is_released

STAGES = [0, 1, 2, 3]


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: value.float().clone() for name, value in engine.zero.full_parameters()}


# Accumulation


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_accumulated_micro_batches_equal_one_batch(ranks, stage, offload):
    layout = Layout(stage=stage, offload=offload)
    halves = ranks(2).run(train, layout=layout, steps=3, plain=True, accumulation_steps=2)[0]
    again = ranks(2).run(train, layout=Layout(stage=stage), steps=3, plain=True, accumulation_steps=2)[0]
    assert halves.digest == again.digest  # within a stage the tier changes nothing
    bounds = bounds_of_accumulation()
    for step, norm in enumerate(
        halves.grad_norms
    ):  # Adam after clipping makes the same steps from gradients of any scale
        bounds.check_elements(f"norm {step}", torch.tensor(norm))
    for name, value in halves.weights.items():
        bounds.check_elements(name, value)


@functools.cache
def bounds_of_accumulation() -> Bounds:
    stream = list(batches(6, rank=0, world=1))
    return bounds_of_training([stream[:2], stream[2:4], stream[4:]], outside=False)


def bounds_of_training(steps: list[list[torch.Tensor]], **options) -> Bounds:
    """Weights and gradient norms of one process that steps on the mean loss of each list of batches. Adam divides by sqrt(v), so a small
    gradient's error is as large in the weight as a large one's: each element has its own bound."""

    def compute() -> dict[str, torch.Tensor]:
        model = build().double()
        decayed = {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decayed, others], lr=1e-2, betas=(0.9, 0.95), foreach=False)
        norms = {}
        for step, micro_batches in enumerate(steps):
            optimizer.zero_grad()
            for tokens in micro_batches:
                (model(tokens, **options) / len(micro_batches)).backward()
            norms[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
        return norms | dict(model.named_parameters())

    # A product sums over 4 * WIDTH + 7 hidden elements; the norm over all gradients, but by tensors, buckets and vector registers. Of 10
    # samples the largest is less than a tenth of the typical error at one element in 1e11.
    return Bounds(compute=compute, longest_sum=4 * WIDTH + 7, samples=10)


def of_two_ranks() -> torch.Tensor:
    return torch.arange(48).remainder(CLASSES).view(2, 4, 6)


def no_sync_run(process, *, stage: int, manual: bool):
    engine = make_engine(process, layout=Layout(stage=stage), accumulation_steps=2)
    process.comm.counters.reset()
    tokens = of_two_ranks()[process.rank]
    if manual:
        with engine.no_sync():
            engine.backward(engine(tokens))
        moved = sum(process.comm.counters.elements.values()) - process.comm.counters.elements["all_gather"]
        assert moved == 0, process.comm.counters.elements
        engine.step()
    else:
        engine.backward(engine(tokens))
        engine.step()
    engine.backward(engine(tokens))
    assert engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_moves_no_gradient_and_changes_no_result(ranks, stage):
    bounds = bounds_of_two_ranks()
    for manual in (False, True):
        for name, value in ranks(2).run(no_sync_run, stage=stage, manual=manual)[0].items():
            bounds.check_elements(name, value)


@functools.cache
def bounds_of_two_ranks() -> Bounds:
    return bounds_of_training([list(of_two_ranks())])


# Frozen parameters, evaluation, PyTorch's own way to run the backward


def frozen_run(process, *, stage: int, offload: str):
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "down" in name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = make_engine(process, layout=Layout(stage=stage, offload=offload), model=model)
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    for _ in range(3):
        engine.backward(engine(tokens))
        engine.step()
    after = weights_of(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "down" in name}
    return after


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_frozen_parameters_stay_and_cost_no_states(ranks, offload):
    runs = [ranks(2).run(frozen_run, stage=stage, offload=offload)[0] for stage in STAGES]
    for run in runs[1:]:
        assert all(torch.equal(run[name], runs[0][name]) for name in run)


def evaluation_run(process, *, stage: int, evaluate: bool):
    engine = make_engine(process, layout=Layout(stage=stage))
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    for _ in range(4):
        if evaluate:
            with engine.evaluating():
                engine(tokens, use_all=False)
                engine(tokens)
        engine.scale(engine(tokens)).backward()
        engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_steps_and_a_plain_backward_change_nothing(ranks, stage):
    plain = ranks(2).run(evaluation_run, stage=stage, evaluate=False)[0]
    mixed = ranks(2).run(evaluation_run, stage=stage, evaluate=True)[0]
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)


# Recomputed activations


class Recomputed(Model):
    """Blocks under activation checkpointing, wrapped from outside as Hugging Face models do."""

    reentrant = False
    saved = 0

    def forward(self, tokens, **_):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, dims=1).flatten())


class Direct(Model):
    def forward(self, tokens, **_):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, dims=1).flatten())


def recompute_run(process, *, stage: int, kind: str):
    torch.manual_seed(0)
    model = Direct() if kind == "direct" else Recomputed()
    model.reentrant = kind == "reentrant"
    return train(process, layout=Layout(stage=stage), steps=5, model=model)


@pytest.mark.parametrize("kind", ["non_reentrant", "reentrant"])
@pytest.mark.parametrize("stage", STAGES)
def test_recomputation_changes_nothing(ranks, stage, kind):
    direct = ranks(2).run(recompute_run, stage=stage, kind="direct")[0]
    recomputed = ranks(2).run(recompute_run, stage=stage, kind=kind)[0]
    assert recomputed.digest == direct.digest


def saved_bytes(process, *, recompute: bool) -> int:
    """Bytes of activations that one forward keeps, seen by hooks outside of everything."""
    torch.manual_seed(0)
    engine = make_engine(process, layout=Layout(stage=3), model=Recomputed() if recompute else Direct())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        engine.backward(engine(torch.arange(24).remainder(CLASSES).view(4, 6)))
    return sum(kept)


def test_recomputation_still_saves_memory_under_stage_3(ranks):
    recomputed = ranks(2).run(saved_bytes, recompute=True)[0]
    direct = ranks(2).run(saved_bytes, recompute=False)[0]
    assert recomputed < direct / 2


# Modules that not every rank uses


def uneven_run(process, *, stage: int):
    """Only rank 0 uses the last block; its gradient is half of the gradient if both did."""
    engine = make_engine(process, layout=Layout(stage=stage), optimizer=OptimizerPolicy(name="sgd", lr=1.0))
    before = weights_of(engine)
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    engine.backward(engine(tokens, use_all=process.rank == 0))
    engine.step()
    after = weights_of(engine)
    return {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_module_that_one_rank_skips_counts_as_zero_there(ranks, stage):
    changes = ranks(2).run(uneven_run, stage=stage)
    model = build()
    model(torch.arange(24).remainder(CLASSES).view(4, 6)).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(changes[0][name], changes[1][name])
        if name.startswith("sometimes"):
            torch.testing.assert_close(changes[0][name], parameter.grad / 2, rtol=1e-4, atol=1e-6)


def test_ranks_that_run_different_modules_at_stage_3_are_told_apart():
    """Other libraries hang when a rank gathers a module that the other rank does not run. Here both errors name the module of each rank."""
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match=r"CommMismatch: .*all_gather sometimes\.0"):
            pool.run(uneven_run, stage=3)
    finally:
        pool.close()


# Faults


def nan_run(process, *, stage: int, dtype: str):
    engine = make_engine(process, layout=Layout(stage=stage), dtype=dtype)
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    for step in range(60):
        loss = engine(tokens)
        if process.rank == 1 and step >= 2:
            # the gradient of this term is NaN where the weight enters, and only there
            weight = engine.module.blocks[1].down.weight
            with engine.zero.gathered():
                loss = loss + (weight * float("nan")).sum() * 0
                engine.backward(loss)
        else:
            with engine.zero.gathered():
                engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_nan_gradient_on_one_rank_ends_all_and_is_named(stage, dtype):
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match=r"FloatingPointError: step \d+: the gradient of blocks\.1\.down\.weight"):
            pool.run(nan_run, stage=stage, dtype=dtype)
    finally:
        pool.close()


def dying_run(process, *, moment: str):
    engine = make_engine(process, layout=Layout(stage=3))
    seen = {"count": 0}

    def before(label: str) -> None:
        seen["count"] += moment in label
        if process.rank == 1 and seen["count"] == 12:
            os.kill(os.getpid(), 9)

    process.comm.before = before
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    for _ in range(30):
        engine.backward(engine(tokens))
        engine.step()


@pytest.mark.parametrize("moment", ["all_gather", "reduce_scatter", "gradient norm"])
def test_a_killed_rank_is_noticed_at_once(moment):
    pool = RankPool(2)
    try:
        pool.run(len_of_world)  # start up
        start = time.monotonic()
        with pytest.raises(RankFailed):
            pool.run(dying_run, moment=moment)
        assert time.monotonic() - start < 15  # a second here; a rank that waits for the dead one ends after minutes
    finally:
        pool.close()


def len_of_world(process) -> int:
    return process.world_size


def delayed_run(process, *, stage: int, where: str, offload: str):
    """Waits where a missing synchronisation would let wrong numbers through."""

    def before(label: str) -> None:
        if where in label:
            time.sleep(0.02 if process.rank else 0.002)

    process.comm.before = before
    try:
        return train(process, layout=Layout(stage=stage, offload=offload), steps=2)
    finally:
        process.comm.before = None


@pytest.mark.parametrize("where", ["all_gather", "reduce"])
@pytest.mark.parametrize("stage", STAGES)
def test_slow_communication_changes_no_number(ranks, stage, where):
    slow = ranks(2).run(delayed_run, stage=stage, where=where, offload="none")[0]
    fast = ranks(2).run(train, layout=Layout(stage=stage), steps=2)[0]
    assert slow.digest == fast.digest


def step_without_backward(process, *, stage: int):
    engine = make_engine(process, layout=Layout(stage=stage))
    with pytest.raises(RuntimeError, match="call backward"):
        engine.step()


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", STAGES)
def test_backward_of_a_forward_from_before_a_step_is_refused(ranks, stage, offload):
    """Old activations with new weights would give a wrong gradient; torch's optimizers raise the same error."""
    said = ranks(2).run(late_backward, layout=Layout(stage=stage, offload=offload))
    assert all("has been modified" in text for text in said), said


def late_backward(process, *, layout: Layout) -> str:
    engine = make_engine(process, layout=layout)
    tokens = next(iter(batches(1, rank=process.rank, world=process.world_size)))
    old = engine(tokens)
    engine.backward(engine(tokens))
    engine.step()
    with pytest.raises(RuntimeError) as refused:
        engine.backward(old)
    return str(refused.value)


def test_step_without_backward_says_so(ranks):
    ranks(2).run(step_without_backward, stage=1)


def failed_backward(process, *, stage: int) -> tuple[str, bool]:
    """The message of a plain `loss.backward()` after one that raised before any bucket was complete; whether the run has the usual weights once
    the gradients are dropped."""

    def fail(gradient):
        raise FloatingPointError("a hook of the script")

    def run(*, fails: bool) -> tuple[str, dict]:
        engine, said = make_engine(process, layout=Layout(stage=stage, zero={"bucket_size": 10**6})), ""
        for step, tokens in enumerate(batches(2, rank=process.rank, world=process.world_size)):
            if fails and step == 1:
                handle = engine.module.sometimes[0].up.register_forward_hook(
                    lambda module, args, out: out.register_hook(fail) and None
                )
                with pytest.raises(FloatingPointError):
                    engine(tokens).backward()
                handle.remove()
                with pytest.raises(RuntimeError) as raised:
                    engine(tokens).backward()
                said = str(raised.value)
                engine.discard_gradients()
            engine(tokens).backward()
            engine.step()
        return said, weights_of(engine)

    (said, weights), (_, usual) = run(fails=True), run(fails=False)
    return said, all(torch.equal(weights[name], usual[name]) for name in usual)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_after_one_that_raised_is_refused_until_gradients_are_dropped(ranks, stage):
    for said, is_usual in ranks(1).run(failed_backward, stage=stage):
        assert "the last backward did not end" in said and is_usual


def placeholder_run(process):
    """Outside of the forward a sharded parameter keeps its shape and reads as NaN; inside `gathered` it is itself."""
    engine = make_engine(process, layout=Layout(stage=3))
    weight = engine.module.blocks[0].up.weight
    assert weight.shape == (96, 24) and is_released(weight)
    with engine.zero.gathered():
        torch.testing.assert_close(engine.module.blocks[0].up.weight, build().blocks[0].up.weight)
    assert is_released(weight)
    assert engine.zero.num_parameters == sum(p.numel() for p in build().parameters())


def test_sharded_parameters_are_placeholders(ranks):
    ranks(2).run(placeholder_run)
    assert SHARD_ALIGNMENT % 16 == 0


def prefetch_run(process, *, ahead: int) -> list[list[str]]:
    """For every block in the forward of the second step: which blocks are not sharded while it computes."""
    engine = make_engine(process, layout=Layout(stage=3, zero={"bucket_size": 10**6, "prefetch_bucket_size": ahead}))
    seen = []

    def look(module, args):
        live = [b.traits.unit for b in engine.zero.buckets if b.state is not ParameterState.sharded]
        seen.append(sorted(name for name in live if name != "root"))

    for block in engine.module.blocks:
        block.register_forward_pre_hook(look)
    tokens = torch.arange(24).remainder(CLASSES).view(4, 6)
    for _ in range(2):
        engine.backward(engine(tokens, outside=False))
        engine.step()
    return seen[3:]


def test_the_next_unit_is_gathered_while_one_computes(ranks):
    """The hook runs just before a block's own gather, so without prefetching nothing but the root is there."""
    assert ranks(2).run(prefetch_run, ahead=0)[0] == [[], [], []]
    one = ranks(2).run(prefetch_run, ahead=1)[0]
    assert one == [["blocks.0"], ["blocks.1"], ["blocks.2"]]
