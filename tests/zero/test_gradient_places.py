"""Products of a backward that write gradients into buckets: the same bits as copies, and nothing that a script keeps changes under it.

On a CPU, where oneDNN's products write into tensors of their own, the tests switch them off.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from tests.device_tagged import products_of_torch
from tests.planner.measure import SHAPE, Case, planned
from tests.zero.models import WIDTH, Layout, Model, batches, build, make_engine, train
from ztk.nn.linear import speed_up_linear_layers
from ztk.planner.trace import STEPS
from ztk.zero.buckets.gradient import BucketGradient

PLAIN = {"use_all": True, "outside": False}


@contextmanager
def products(*, into_places: bool):
    """Products by torch. into_places: as on a GPU."""
    linear = sys.modules["ztk.nn.linear"]
    with products_of_torch(), mock.patch.object(linear, "_computes_elsewhere", lambda x: into_places):
        yield


@contextmanager
def places():
    """Counts the places that were given away, "given", and those whose gradient was there when it was accepted, "written"."""
    counts: Counter[str] = Counter()
    place, accept = BucketGradient.place, BucketGradient.accept

    def given(gradient: BucketGradient, index: int, **options):
        view = place(gradient, index, **options)
        counts["given"] += view is not None
        return view

    def accepted(gradient: BucketGradient, index: int, **options):
        own = gradient.parameters[index].grad
        if index in gradient._placed:
            counts["written"] += own.data_ptr() == gradient._view(index).data_ptr()
        accept(gradient, index, **options)

    with mock.patch.multiple(BucketGradient, place=given, accept=accepted):
        yield counts


def quick_model() -> Model:
    model = build()
    speed_up_linear_layers(model)
    return model


def digests(process, *, stage: int, options: dict) -> tuple[str, str, Counter]:
    """Of runs with copies and with places."""
    with products(into_places=False):
        copied = train(process, layout=Layout(stage=stage), steps=4, model=quick_model(), **options)
    with products(into_places=True), places() as counts:
        placed = train(process, layout=Layout(stage=stage), steps=4, model=quick_model(), **options)
    return copied.digest, placed.digest, counts


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_bits(ranks, stage, options):
    for copied, placed, counts in ranks(2).run(digests, stage=stage, options=options):
        assert copied == placed
        assert counts["given"] == counts["written"] >= 4 * 5


def kept_gradients(process, *, keep: str) -> tuple[list[torch.Tensor], list[torch.Tensor], Counter]:
    """The gradients that `keep(engine, tokens, kept)` kept of two backwards: their values then, and after the steps."""
    copies: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    with products(into_places=True), places() as counts:
        engine = make_engine(process, layout=Layout(stage=1), model=quick_model())
        for tokens in batches(2, rank=process.rank, world=process.world_size):
            KEEPING[keep](engine, tokens, kept)
            copies += [value.clone() for value in kept[len(copies) :]]
            engine.step()
    return kept, copies, counts


def hook_on_a_weight(engine, tokens, kept) -> None:
    handle = engine.module.blocks[0].up.weight.register_hook(kept.append)
    engine.backward(engine(tokens, **PLAIN))
    handle.remove()


def later_hook_on_a_weight(engine, tokens, kept) -> None:
    weight = engine.module.blocks[0].up.weight
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
    engine.backward(engine(tokens, **PLAIN))
    handle.remove()


def gradients_inside_a_backward(engine, tokens, kept) -> None:
    """A hook of a later activation computes gradients of weights whose own gradients are still missing."""
    block, inputs = engine.module.blocks[0], torch.randn(2, 6, WIDTH)

    def ask(gradient):
        with torch.enable_grad():
            own = block(inputs).square().sum()
        kept.extend(torch.autograd.grad(own, [block.up.weight, block.down.weight]))

    handle = engine.module.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(ask) and None)
    engine.backward(engine(tokens, **PLAIN))
    handle.remove()


KEEPING = {keep.__name__: keep for keep in (hook_on_a_weight, later_hook_on_a_weight, gradients_inside_a_backward)}


@pytest.mark.parametrize("keep", KEEPING)
def test_what_a_script_keeps_stays(ranks, keep):
    for kept, copies, counts in ranks(2).run(kept_gradients, keep=keep):
        assert len(kept) >= 2 and counts["given"] == counts["written"] > 0
        assert all(torch.equal(value, copy) for value, copy in zip(kept, copies, strict=True))


def test_copies_of_a_step_on_a_gpu(tmp_path):
    """Per layer the norms' two weights; of the rest the embedding, the last norm, and the head, whose gradient is the first that comes."""
    counts: Counter[str] = Counter()
    accept = BucketGradient.accept

    def accepted(gradient: BucketGradient, index: int, **options):
        counts["gradients"] += 1
        counts["in place"] += index in gradient._placed
        accept(gradient, index, **options)

    with mock.patch.object(BucketGradient, "accept", accepted):
        planned(Case(ranks=2, stage=3, dtype="bf16"), folder=str(tmp_path))
    layers = SHAPE["layers"]
    assert counts == {"gradients": STEPS * (9 * layers + 3), "in place": STEPS * 7 * layers}
