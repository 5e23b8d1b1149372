"""Layers sharded over two ranks: the tokens of one rank, for every batch."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import ztk
from tests.inference.models import VOCABULARY, build, build_decoder
from tests.inference.schedules import run_schedule
from tests.inference.test_own_modules import OTHERS, build_other
from tests.inference.test_room import LONG, UNIT
from tests.late_nccl import LateRanks
from ztk.core.runtime import PeerLost
from ztk.core.runtime.comm.comm import INLINE_BYTES
from ztk.inference import Generator, InferencePolicy, SamplingParams, probe
from ztk.inference.cache import Cache, Span
from ztk.inference.cut import Cut
from ztk.inference.describe import describe
from ztk.inference.kernel_products import RowsProduct
from ztk.inference.opening import ReadParameters
from ztk.inference.parts import blank, item_of
from ztk.inference.placement import Placement
from ztk.inference.products import Affine
from ztk.inference.quantised import FORMATS
from ztk.inference.ranks import Ranks
from ztk.zero.offload import OffloadPolicy

PROMPTS = [[3, 1, 4], [5] * 20, [(7 * i + 3) % VOCABULARY for i in range(70)]]
GREEDY = SamplingParams(max_tokens=8, temperature=0)
# Those that are cut in ways of their own; tests/slow/test_answers.py has all.
FOREIGN = ["gpt2", "bloom", "gpt_neox", "phi3", "opt", "olmo2", "gemma2", "qwen2_moe"]
OWN = {
    "native": lambda: build_decoder(vocab_size=97),  # which two ranks cannot divide
    "native with experts": lambda: build_decoder(experts=4, experts_every=2, shared_hidden_dim=24),
    "one key head": lambda: build_decoder(kv_heads=1),
    "three key heads": lambda: build_decoder(heads=6, kv_heads=3, dim=48),  # which two ranks cannot divide
    "olmo2 with one key head": lambda: build("olmo2", num_key_value_heads=1),
}


@pytest.fixture
def late_ranks(ranks):
    """Pools of ranks with late collectives. Ranks that fail use `ranks`, whose transport tells the others at once."""
    return lambda world_size: LateRanks(ranks(world_size))


def made(name: str):
    if name in OTHERS:
        return build_other(name)
    return OWN[name]() if name in OWN else build(name)


def answers_of_both(process: ztk.Process, *, names: list[str], weights: str) -> list[list[list]]:
    """Tokens and log-probabilities of each model on two ranks and on one."""
    found = []
    for name in names:
        model, policy = made(name), InferencePolicy(max_step_tokens=48, weights=weights)
        generator = Generator(model, policy=policy, comm=process.comm)
        if generator.follows:
            generator.follow()
            continue
        full = Generator(model, policy=policy)
        assert generator.weight_bytes < full.weight_bytes, name
        both = [each.generate(PROMPTS, sampling=GREEDY) for each in (generator, full)]
        generator.close()
        found.append([[(answer.tokens, answer.logprobs) for [answer] in answers] for answers in both])
    return found


@pytest.mark.parametrize("names", [FOREIGN, list(OWN), list(OTHERS)], ids=["transformers", "native", "own modules"])
def test_two_ranks_have_the_tokens_of_one(late_ranks, names):
    for name, (two, one) in zip(
        names, late_ranks(2).run(answers_of_both, names=names, weights="stored")[0], strict=True
    ):
        assert [tokens for tokens, _ in two] == [tokens for tokens, _ in one], name
        for (_, cut), (_, full) in zip(two, one, strict=True):
            torch.testing.assert_close(cut, full, rtol=1e-4, atol=1e-4)  # as of transformers in test_families


def schedules_of_leader(process: ztk.Process, *, name: str, seeds: list[int], weights: str) -> list:
    """Random schedules by two ranks."""
    model, found = made(name), []
    for seed in seeds:
        shared = run_schedule(model, seed=seed, weights=weights, comm=process.comm)
        found.append(shared[0])
    return found


def schedules_in_little_memory(process: ztk.Process, *, seeds: list[int]) -> list:
    """Long texts by two ranks, for one of which there is memory, or for three short ones."""
    model = build_decoder(max_seq_len=1024)
    return [
        run_schedule(model, seed=seed, requests=LONG, comm=process.comm, cache_tokens=3 * UNIT)[0] for seed in seeds
    ]


def test_ranks_preempt_alike(late_ranks):
    first, *others = late_ranks(2).run(schedules_in_little_memory, seeds=[0])[0]
    assert all(other == first for other in others)


@pytest.mark.parametrize(("name", "weights"), [("native", "stored"), ("mixtral", "int4"), ("smollm3", "int8")])
def test_random_schedules_change_no_bit(late_ranks, name, weights):
    first, *others = late_ranks(2).run(schedules_of_leader, name=name, seeds=[0, 1], weights=weights)[0]
    assert all(other == first for other in others)


def test_followers_are_told_new_blocks_alone():
    """Of a sequence that goes on; of one that took another's slot, all that differ. Their tables are the leader's then."""
    of, place = describe(build_decoder()).description, {"device": torch.device("cpu"), "dtype": torch.float32}
    leader, follower = (Cache(of, slots=2, blocks=9, width=9, **place) for _ in range(2))
    leader.record()
    span = Span(slot=1, start=0, length=1, row=0)
    for table, told in (([3, 4], 2), ([3, 4, 7], 1), ([3, 4, 7], 0), ([5, 4], 2), ([8], 1)):
        leader.tables[1] = list(table)
        log = leader.take_log([span])
        follower.repeat(log)
        assert follower.tables[1] == table and sum(len(named["blocks"]) for _, _, named in log) == told


def test_heads_that_cannot_be_divided_are_refused():
    description = Generator(build_decoder(heads=6, kv_heads=2, dim=48)).description
    assert Cut(rank=5, size=6).own(description).kv_heads == 1
    five = replace(description, heads=10, kv_heads=5)
    parts = [Cut(rank=rank, size=3).heads(five) for rank in range(3)]
    assert parts == [(range(4), range(2)), (range(4, 8), range(2, 4)), (range(8, 10), range(4, 5))]
    for refused in ({"equal": True}, {"description": replace(five, qk_norm="all")}):
        with pytest.raises(ValueError, match="topology.tensor=3: 10 query heads and 5 key heads cannot be divided"):
            Cut(size=3).heads(**{"description": five} | refused)
    with pytest.raises(ValueError, match="topology.tensor=4: 6 query heads and 2 key heads cannot be divided by it"):
        Cut(size=4).own(description)


def test_every_rank_has_a_part_of_an_mlp():
    """For any width. Columns that share a scale stay together if there are enough groups, for example 1408 columns on eight ranks."""
    for size, width in ((8, 1408), (3, 385), (4, 640), (2, 300), (4, 5)):
        up, down = Affine(weight=torch.randn(width, 3)), Affine(weight=torch.randn(3, width))
        parts = [Cut(rank=rank, size=size).inner(gate=None, up=up, down=down)[1:] for rank in range(size)]
        assert min(len(own.weight) for own, _ in parts) > 0
        assert torch.equal(torch.cat([own.weight for own, _ in parts]), up.weight)
        assert torch.equal(torch.cat([own.weight for _, own in parts], dim=1), down.weight)
        assert width < size * 128 or all(len(own.weight) % 128 == 0 for own, _ in parts[:-1])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("size", "width"), [(2, 64), (4, 100), (2, 300), (2, 896), (3, 384)])
def test_ranks_compute_with_the_quantised_weights_of_one(kind, size, width):
    """Rows of one input each show the weights; heads are cut inside groups of int4, too."""
    weight = torch.randn(32, width, generator=torch.Generator().manual_seed(width)) * torch.linspace(0.1, 9, width)
    place = Placement(device=torch.device("cpu"), dtype=torch.float32, kind=kind)
    makes = [partial(RowsProduct, form=kind, placement=place)] + ([] if kind == "fp8" else [FORMATS[kind][0]])
    for make in makes:

        def shown(affine: Affine, make=make) -> torch.Tensor:
            product, x = make(affine), torch.eye(affine.weight.shape[1])
            if not isinstance(product, RowsProduct):
                again = blank(item_of("out", value=product))  # as streamed layers are built
                again.adopt(product.tensors())
                assert torch.equal(again(x), product(x))
            return product(x)

        each = range(0, width + 1, width // size)
        full = Affine(weight=weight)
        parts = [
            shown(Cut(rank=rank, size=size).inputs(full, part=range(each[rank], each[rank + 1])))
            for rank in range(size)
        ]
        assert torch.equal(torch.cat(parts), shown(full))


def weights_of_an_engine(process: ztk.Process, *, stage: int) -> list[list[int]]:
    """Answers before, after a step of training by `load`, and of a generator that is made of the engine."""
    engine = ztk.parallelize(
        build_decoder(), process=process, optimizer=ztk.OptimizerPolicy(lr=1e-2), zero=ztk.ZeroPolicy(stage=stage)
    )
    found, generator = [], Generator(engine, comm=process.comm)

    def answer() -> None:
        if generator.follows:
            generator.follow()
        else:
            found.append(generator.generate([PROMPTS[1]], sampling=GREEDY)[0][0].tokens)
            generator.dismiss()

    answer()
    tokens = torch.arange(64).view(2, 32) * (process.rank + 2) % VOCABULARY
    engine.backward(engine(tokens, tokens.roll(-1, 1)))
    engine.step()
    generator.load(engine)
    answer()
    fresh = Generator(engine)
    found.append(fresh.generate([PROMPTS[1]], sampling=GREEDY)[0][0].tokens)
    engine.close()
    return found


def test_weights_come_from_a_training_engine(late_ranks):
    before, after, fresh = late_ranks(2).run(weights_of_an_engine, stage=3)[0]
    assert before != after == fresh


def broken_by_kernels(process: ztk.Process) -> list[str]:
    """The error that names the layer."""
    policy = InferencePolicy(kernels=True, max_model_len=192, max_step_tokens=48)
    generator = Generator(build_decoder(), policy=policy, comm=process.comm)
    generator._model.weights.layers[1].out.weight[0, 0] = float("inf")
    generator.read = ReadParameters(None)
    if generator.follows:
        generator.follow()
        return []
    [[broken]] = generator.generate([PROMPTS[2]], sampling=GREEDY)
    generator.close()
    return [str(broken.error)]


def test_a_broken_layer_is_named_by_kernels(late_ranks):
    [error] = late_ranks(2).run(broken_by_kernels)[0]
    assert "first after layer 1 of 2" in error


def broken_and_long(process: ztk.Process) -> tuple[list[str], int]:
    """Errors that name the layer, and the steps of a message that is longer than one broadcast."""
    model = build_decoder(max_seq_len=8192)
    generator = Generator(model, policy=InferencePolicy(max_step_tokens=8192), comm=process.comm)
    if generator.follows:
        generator.follow()
        return [], 0
    long = [number % VOCABULARY for number in range(INLINE_BYTES // 2)]  # two bytes each
    [[answer]] = generator.generate([long], sampling=SamplingParams(max_tokens=1))
    generator._model.weights.layers[1].mlp.down._bias = torch.full((32,), float("nan"))
    [[broken]] = generator.generate([PROMPTS[0]], sampling=GREEDY)
    generator.close()
    return [str(broken.error)], len(answer.tokens)


def test_a_broken_layer_is_named_and_long_messages_arrive(late_ranks):
    (error,), count = late_ranks(2).run(broken_and_long)[0]
    assert "first after layer 1 of 2" in error and count == 1


def by_kernels(process: ztk.Process, *, names: list[str], weights: str) -> list[list]:
    """Tokens by kernels by two ranks and by one: the likeliest, drawn ones, and some that the host draws from logits; and log-probabilities of
    the likeliest."""
    found, policy = [], InferencePolicy(kernels=True, max_model_len=192, max_step_tokens=48, weights=weights)
    kinds = [GREEDY, SamplingParams(max_tokens=6, seed=3), SamplingParams(max_tokens=3, top_k=5, logprobs=2)]
    for name in names:
        generator = Generator(made(name), policy=policy, comm=process.comm)
        if generator.follows:
            generator.follow()
            continue
        both = [
            each.generate(PROMPTS * 3, sampling=[kind for kind in kinds for _ in PROMPTS])
            for each in (generator, Generator(made(name), policy=policy))
        ]
        generator.close()
        found.append([
            ([answer.tokens for [answer] in answers], torch.cat([answer.logprobs for [answer] in answers[:3]]))
            for answers in both
        ])  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["native", "native with experts"], "stored"),
        (["olmo2 with one key head", "bloom"], "stored"),
        (["native with experts", "bloom"], "int4"),
        (["native", "phi3"], "int8"),
    ],
)
def test_two_ranks_have_the_tokens_of_one_by_kernels(late_ranks, names, weights):
    """Of quantised weights, too: both compute with the same ones, in fp32."""
    for name, (two, one) in zip(names, late_ranks(2).run(by_kernels, names=names, weights=weights)[0], strict=True):
        assert two[0] == one[0], name
        torch.testing.assert_close(two[1], one[1], rtol=1e-4, atol=1e-4)  # as of transformers


def schedules_by_kernels(process: ztk.Process, *, seeds: list[int], folder: str, cache_dtype: str) -> tuple[list, int]:
    model, found, preempted = build_decoder(kv_heads=1), [], 0
    for seed in seeds:
        tight = {
            "kernels": True,
            "max_model_len": 192,
            "cache_tokens": 64 * (3 + seed % 2),
            "cache_dtype": cache_dtype,
        }
        if seed % 2:
            tight["offload"] = OffloadPolicy(parameters="nvme", nvme_path=folder, block_bytes=1 << 16, threads=1)
        digests, generator = run_schedule(model, seed=seed, comm=process.comm, **tight)
        found.append(digests)
        preempted += generator.preempted
    return found, preempted


@pytest.mark.parametrize("cache_dtype", ["stored", "fp8"])
def test_blocks_of_all_ranks_are_copied_and_preempted_together(cache_dtype, late_ranks, tmp_path):
    given = {"folder": str(tmp_path), "cache_dtype": cache_dtype}
    (first, *others), preempted = late_ranks(2).run(schedules_by_kernels, seeds=[0, 1], **given)[0]
    assert all(other == first for other in others) and preempted > 0


LAYERED = {
    "native": lambda: build_decoder(layers=6, kv_heads=1),
    "own modules": lambda: build_other("smollm3", num_hidden_layers=6),
}


def streamed_by_both(process: ztk.Process, *, name: str, folder: str) -> list:
    """Tokens of one rank in memory and of two ranks that read their parts; bytes that each reads per pass and has read per step."""
    model = LAYERED[name]()
    place = OffloadPolicy(parameters="nvme", nvme_path=folder, block_bytes=1 << 16, threads=1)
    policy = InferencePolicy(max_sequences=3, max_step_tokens=48, offload=place)
    roomy = Generator(model, policy=policy, comm=process.comm)
    if roomy.follows:
        roomy.follow()
    roomy.close()
    sizes = roomy.plan.sizes
    memory = sizes.fixed + 3 * sizes.layer + 3 * sizes.sequence + sizes.working(sequences=3, rows=48)
    generator = Generator(model, policy=replace(policy, memory_bytes=memory), comm=process.comm)
    assert generator.plan.resident == 0 and generator.plan.sequences == 3
    if generator.follows:
        generator.follow()
        return [generator.plan.pass_bytes]
    one = Generator(model, policy=InferencePolicy(max_step_tokens=48)).generate(PROMPTS, sampling=GREEDY)
    before = generator.streamed_bytes
    two = generator.generate(PROMPTS, sampling=GREEDY)
    moved = generator.streamed_bytes - before
    generator.close()
    return [generator.plan.pass_bytes, moved, [[answer.tokens for [answer] in answers] for answers in (one, two)]]


@pytest.mark.parametrize("name", LAYERED)
def test_each_rank_reads_its_part_of_every_layer(name, late_ranks, tmp_path):
    (nbytes, moved, (one, two)), (other,) = late_ranks(2).run(streamed_by_both, name=name, folder=str(tmp_path))
    assert one == two and nbytes == other and moved and moved % nbytes == 0
    assert not list(tmp_path.iterdir())


class Planted(Exception):
    pass


def fail(*given, **named):
    raise Planted("planted")


def refused_by_one(process: ztk.Process, *, refusing: int) -> list[str]:
    """The error on each rank when one refuses alone: between exchanges, and while the other waits for its part of a sum."""
    found = []
    for what, name in ((probe, "check_products"), (Ranks, "sum")):
        with pytest.MonkeyPatch.context() as patch:
            if process.rank == refusing:
                patch.setattr(what, name, fail)
            with pytest.raises((Planted, PeerLost)) as caught:
                Generator(build_other("smollm3") if what is Ranks else build_decoder(), comm=process.comm)
            found.append(f"{type(caught.value).__name__}: {caught.value}")
    generator = Generator(build_decoder(), comm=process.comm)  # and they open a model afterwards
    if generator.leads:
        generator.submit(PROMPTS[0], sampling=GREEDY)
    with pytest.raises(RuntimeError, match="load: requests are not answered yet"):
        generator.load(None)
    if generator.follows:
        generator.follow()
    generator.close()
    return found


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_rank_refuses_all_refuse_with_its_reason(ranks, refusing):
    found = ranks(2).run(refused_by_one, refusing=refusing)
    assert found[refusing] == ["Planted: planted"] * 2
    between, within = found[1 - refusing]
    assert between == f"PeerLost: rank {refusing} could not open the model: Planted: planted"
    assert "another rank has stopped to open the model" in within and "end of opening" in within


def failing_step(process: ztk.Process, *, failing: int) -> str:
    """The error on each rank when one fails in the middle of a step. Uses its own connections, which end with the error."""
    comm = process.arrange(ztk.Topology(tensor=2)).mesh.comm("tp")
    generator = Generator(build_decoder(), comm=comm)
    if process.rank == failing:
        generator._model.ops.mlp = fail
    with pytest.raises((Planted, PeerLost)) as caught:
        generator.follow() if generator.follows else generator.generate([PROMPTS[0]], sampling=GREEDY)
    return type(caught.value).__name__


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_a_step_is_heard_of(ranks, failing):
    found = ranks(2).run(failing_step, failing=failing)
    assert found[failing] == "Planted" and found[1 - failing] == "PeerLost"
