"""Models and loops with habits that sharding must survive: each trains to the same bits at stage 3 as at stage 0, or is refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankFailed, RankPool
from tests.zero.models import CLASSES, WIDTH, Block, Layout, build, make_engine
from ztk.core.policies.zero import ZeroPolicy
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.zero.buckets.residency import ParameterState
from ztk.zero.buckets.units import plan_units
from ztk.zero.offload import OffloadPolicy


class Language(nn.Module):
    """Embedding, a body, a head; subclasses differ in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.build_body()

    def forward(self, tokens: Tensor, **_) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embedding(tokens))).flatten(0, 1), tokens.flatten())


class Table(nn.Module):
    """A unit that returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class Views(Language):
    def build_body(self) -> None:
        self.tables = nn.ModuleList(Table() for _ in range(3))
        self.blocks = nn.ModuleList(Block(odd=0) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        positions = [table(x.shape[1]) for table in self.tables]
        for block in self.blocks:
            x = block(x)
        return x + sum(positions)


class InnerRecompute(Block):
    """Activation checkpointing inside the unit: a forward without wrappers reads the parameters again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Recomputed(Language):
    def build_body(self) -> None:
        self.blocks = nn.ModuleList(InnerRecompute(odd=0) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Spanned(Language):
    """Activation checkpointing around several units, and around a part of the root: a layer that no unit has."""

    def build_body(self) -> None:
        self.blocks = nn.ModuleList(Block(odd=0) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(torch.tanh(x)) * self.last.bias

    def body(self, x: Tensor) -> Tensor:
        x = checkpoint(self.run, x, use_reentrant=False)
        return checkpoint(self.last, x, use_reentrant=False)


class Shared(Language):
    """One block called three times, and a block that is reached by two names."""

    def build_body(self) -> None:
        self.blocks = nn.ModuleList([Block(odd=0), Block(odd=1)])
        self.again = nn.ModuleList([self.blocks[0]])

    def body(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.again[0], self.blocks[0]):
            x = block(x)
        return x


class Containers(Language):
    """Blocks whose container is never called: dictionaries in a list, and a sequence of blocks."""

    def build_body(self) -> None:
        self.layers = nn.ModuleList(
            nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "second": Block(odd=0)}) for _ in range(3)
        )
        self.stack = nn.Sequential(Block(odd=1), nn.GELU(), Block(odd=2))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["second"](torch.tanh(layer["first"](x)))
        return self.stack(x)


class KeepsAWeight(torch.autograd.Function):
    """A linear layer whose backward reads a weight that it kept itself, outside autograd's saved tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight.detach(), x.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight, gradient.flatten(0, 1).t() @ ctx.x.flatten(0, 1)


class Kept(nn.Module):
    """Its weight's views outlive its forward: in a custom function, and in a plain object that the loss reads."""

    def __init__(self, *, notes: dict[int, Tensor], number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.notes, self.number = notes, number

    def forward(self, x: Tensor) -> Tensor:
        self.notes[self.number] = self.weight[0].detach()
        return x + KeepsAWeight.apply(x, self.weight)


class Outliving(Language):
    def build_body(self) -> None:
        self.notes: dict[int, Tensor] = {}
        self.blocks = nn.ModuleList(Kept(notes=self.notes, number=number) for number in range(4))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(self.notes.values())


MODELS = [Views, Recomputed, Spanned, Shared, Containers, Outliving]
TOKENS = torch.arange(24).remainder(CLASSES).view(4, 6)


def losses_of(process, *, kind: type[Language], stage: int) -> list[float]:
    torch.manual_seed(0)
    engine = make_engine(process, layout=Layout(stage=stage), model=kind())
    losses = []
    for _ in range(4):
        loss = engine(TOKENS)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


@pytest.mark.parametrize("kind", MODELS)
def test_awkward_models_train_to_the_same_bits(ranks, kind):
    first = ranks(2).run(losses_of, kind=kind, stage=0)[0]
    assert first[-1] < first[0]
    assert ranks(2).run(losses_of, kind=kind, stage=3)[0] == first


def views_that_were_kept(process, *, stage: int) -> dict[str, list[Tensor]]:
    """Views of weights from forwards and from hooks of backwards, read before the step; the weights then; the views read after it."""
    torch.manual_seed(0)
    model = Outliving()
    kept: dict[int, Tensor] = {}
    for number, block in enumerate(model.blocks):
        block.register_full_backward_hook(
            lambda module, *_, number=number: kept.__setitem__(number, module.weight[0].detach())
        )
    engine = make_engine(process, layout=Layout(stage=stage, zero={"max_reuse_distance": 0}), model=model)
    engine.backward(engine(TOKENS))
    views = [*model.notes.values(), *(kept[number] for number in range(len(model.blocks)))]
    before = [view.clone() for view in views]
    weights = {name: value.clone() for name, value in engine.zero.full_parameters()}
    engine.step()
    weights = [weights[f"blocks.{number}.weight"][0] for number in range(len(model.blocks))] * 2
    return {"before": before, "weights": weights, "after": [view.clone() for view in views]}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_kept_view_of_a_weight_shows_its_value_or_nan(ranks, stage):
    for found in ranks(2).run(views_that_were_kept, stage=stage):
        for before, weight, after in zip(*found.values(), strict=True):
            assert torch.equal(before, weight)
            assert after.isnan().all() if stage == 3 else not torch.equal(after, weight)


def test_elements_of_containers_are_units():
    names = [unit.name for unit in plan_units(Containers())]
    assert names == [f"layers.{i}.{key}" for i in range(3) for key in ("first", "second")] + [
        "stack.0",
        "stack.2",
        "root",
    ]


# Loops


def extra_forward(process, *, stage: int) -> list[float]:
    """A forward for the log between backward and step, with gradients and without a backward."""
    engine = make_engine(process, layout=Layout(stage=stage, zero={"max_reuse_distance": 10**9}))
    losses = []
    for _ in range(4):
        loss = engine(TOKENS)
        engine.backward(loss)
        engine(TOKENS)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_forward_without_a_backward_leaves_no_old_parameters(ranks):
    assert ranks(2).run(extra_forward, stage=3)[0] == ranks(2).run(extra_forward, stage=0)[0]


class Wrapped(nn.Module):
    """A model inside another, as libraries for adapters wrap them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Views()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def parts_by_themselves(process, *, stage: int) -> list[float]:
    """A loop that calls the inner model, its embedding and its head, never the outer one; gathered afterwards: nothing."""
    torch.manual_seed(0)
    engine = make_engine(process, layout=Layout(stage=stage), model=Wrapped())
    inner = engine.module.inner
    losses = []
    for _ in range(3):
        with torch.no_grad():
            losses.append(inner(TOKENS).item())
        inner_loss = F.cross_entropy(inner.head(inner.body(inner.embedding(TOKENS))).flatten(0, 1), TOKENS.flatten())
        engine.backward(inner_loss)
        engine.step()
        losses.append(inner_loss.item())
    assert stage < 3 or all(bucket.state is ParameterState.sharded for bucket in engine.zero.buckets)
    engine.close()
    return losses


def test_parts_of_a_model_may_be_called_by_themselves(ranks):
    first = ranks(2).run(parts_by_themselves, stage=0)[0]
    assert first[-1] < first[0]
    assert ranks(2).run(parts_by_themselves, stage=3)[0] == first


def inference_mode(process, *, stage: int) -> list[float]:
    engine = make_engine(process, layout=Layout(stage=stage))
    losses = []
    for _ in range(3):
        with torch.inference_mode():
            engine(TOKENS)
        loss = engine(TOKENS)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_evaluation_in_inference_mode(ranks):
    assert ranks(2).run(inference_mode, stage=3)[0] == ranks(2).run(inference_mode, stage=0)[0]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("planted")


def failing_backward(process, *, stage: int, offload: str) -> tuple[float, float]:
    """Norms of the same batch: after a backward that broke off half way, and without."""
    engine = make_engine(process, layout=Layout(stage=stage, offload=offload), optimizer=OptimizerPolicy(lr=0.0))
    clean = make_engine(process, layout=Layout(stage=stage, offload=offload), optimizer=OptimizerPolicy(lr=0.0))
    original = engine.module.blocks[0].forward
    engine.module.blocks[0].forward = lambda x: original(Fails.apply(x))
    with pytest.raises(MemoryError, match="planted"):
        engine.backward(engine(TOKENS))
    engine.module.blocks[0].forward = original
    with pytest.raises(RuntimeError, match="discard_gradients"):
        engine.backward(engine(TOKENS))
    engine.discard_gradients()
    norms = []
    for which in (engine, clean):
        which.backward(which(TOKENS))
        which.step()
        norms.append(which.read_metrics().grad_norm)
    return tuple(norms)


@pytest.mark.parametrize("stage, offload", [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "nvme")])
def test_a_backward_that_broke_off_can_be_discarded(ranks, stage, offload):
    again, clean = ranks(2).run(failing_backward, stage=stage, offload=offload)[0]
    assert again == clean > 0


# Frozen models, buffers, placements


def gathered_at_once(process, *, frozen: bool) -> int:
    """The most buckets that are unsharded in the backward of the third step."""
    model = build()
    model.blocks = nn.ModuleList(Block(odd=0) for _ in range(8))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (frozen and name.startswith("blocks"))
    zero = {"bucket_size": 10**6, "prefetch_bucket_size": 1}
    engine = make_engine(process, layout=Layout(stage=3, zero=zero), model=model)
    most = [0]

    def look(label: str) -> None:
        most[0] = max(most[0], sum(bucket.state is not ParameterState.sharded for bucket in engine.zero.buckets))

    for step in range(3):
        loss = engine(TOKENS, use_all=False, outside=False)
        process.comm.before = look if step == 2 else None
        engine.backward(loss)
        process.comm.before = None
        engine.step()
    return most[0]


def test_frozen_blocks_are_released_in_the_backward(ranks):
    trained = ranks(2).run(gathered_at_once, frozen=False)[0]
    frozen = ranks(2).run(gathered_at_once, frozen=True)[0]
    assert trained <= 4 and frozen <= 4


def nvme_parameters_alone(process, *, folder: str) -> float:
    engine = parallelize(
        build(),
        process=process,
        optimizer=OptimizerPolicy(lr=1e-2),
        zero=ZeroPolicy(stage=3),
        offload=OffloadPolicy(parameters="nvme", nvme_path=folder, buffer_bytes=4096, block_bytes=4096),
    )
    for _ in range(3):
        loss = engine(TOKENS)
        engine.backward(loss)
        engine.step()
    engine.close()
    return loss.item()


def test_parameters_on_nvme_with_the_optimizer_on_the_device(ranks, tmp_path):
    """Shards larger than a pool buffer stream through blocks."""
    first = ranks(2).run(nvme_parameters_alone, folder=str(tmp_path))
    assert first[0] == first[1] < 5


def buffers_of(process) -> Tensor:
    model = build()
    torch.manual_seed(process.rank)
    model.register_buffer("features", torch.randn(5))
    return make_engine(process, layout=Layout(stage=1), model=model).module.features.clone()


def test_buffers_equal_rank_0s(ranks):
    first, second = ranks(2).run(buffers_of)
    assert torch.equal(first, second)


def modes(process) -> list[bool]:
    model = build()
    model.blocks[1].eval()
    engine = make_engine(process, layout=Layout(), model=model)
    with engine.evaluating():
        assert not any(module.training for module in engine.module.modules())
    return [block.training for block in engine.module.blocks]


def test_evaluation_returns_every_module_to_its_own_mode(ranks):
    assert ranks(1).run(modes)[0] == [True, False, True]


def nothing_to_train(process) -> None:
    make_engine(process, layout=Layout(), model=build().requires_grad_(False))


def test_a_model_with_nothing_to_train_is_refused():
    pool = RankPool(1)
    try:
        with pytest.raises(RankFailed, match="there is nothing to train"):
            pool.run(nothing_to_train)
    finally:
        pool.close()


class Short(Language):
    """One block, because its test takes hundreds of micro-batches."""

    def build_body(self) -> None:
        self.blocks = nn.ModuleList([Block(odd=0)])

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def many_micro_batches(process, *, stage: int) -> float:
    """288 equal bf16 micro-batches: their mean gradient equals one micro-batch's."""
    norms = []
    for count in (1, 288):  # a sum in bf16 stays at 256
        torch.manual_seed(0)
        layout = Layout(stage=stage)
        engine = make_engine(process, layout=layout, model=Short(), dtype="bf16", accumulation_steps=count)
        for _ in range(count):
            engine.backward(engine(TOKENS))
            engine.step()
        norms.append(engine.read_metrics().grad_norm)
    return norms[1] / norms[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_sums_of_many_16_bit_gradients_do_not_stagnate(ranks, stage):
    assert ranks(2).run(many_micro_batches, stage=stage)[0] == pytest.approx(1, abs=2**-7)  # one bf16 rounding each
