"""Weights that real processes pull over gloo, from a trainer with any layout into a server with another: exact bytes, and none too large."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.parallel.topology.runs import CONFIG, Strategy, arranged, make_engine
from tests.zero.models import Layout
from tests.zero.models import make_engine as make_bf16_engine
from tests.zero.test_device_tagged import on_gpu
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.comm.pulls import CHUNK_BYTES, address_of
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.nn import Decoder, DecoderConfig, initial_values
from ztk.rl.rollout import published
from ztk.rl.rollout.published import Shards
from ztk.serve.models import Opened
from ztk.serve.tokenizers import Bytes
from ztk.serve.weights import Expected

PROMPTS = [[3, 1, 4], [5] * 9]
GREEDY = SamplingParams(max_tokens=8, temperature=0)
# Where layers are cut along their inputs, ranks also pull the largest absolute value of each row for int8, and for int4 the other columns of
# their first and last group: at most all 40 columns of 32 rows in each of 4 layers.
GROUPS = 4 * 4 * 32 * 40 * 2
_KEPT = {}  # in a process of a trainer, between two calls


def offer(process: Process, *, strategy: Strategy, folder: Path, config: DecoderConfig = CONFIG) -> str | None:
    """Offers the weights of a new engine until `end`. Returns the addresses on rank 0."""
    published._PART_BYTES = 1 << 12  # several files per rank
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy, config=config)
    opens = partial(safe_open, framework="pt")
    shards = Shards(engine, folder=folder, save=save_file, opens=opens, channels=[], timeout_seconds=60)
    owners = shards.publish("v1")
    _KEPT.update(engine=engine, shards=shards, held=sum(own.box.numel for own in shards.offer.held))
    if owners is None:
        return None
    return ",".join(address_of(one.secret, host="127.0.0.1", port=one.port, version="v1") for one in owners)


def end(process: Process) -> tuple[int, int]:
    """Elements that this rank offered, and the largest tensor that it made for a message."""
    engine, shards, held = (_KEPT.pop(name) for name in ("engine", "shards", "held"))
    largest = shards.offer.largest_bytes
    shards.close()
    engine.close()
    return held, largest


def model_of(*, seed: int, config: DecoderConfig = CONFIG) -> Decoder:
    """The model of `make_engine` with other first values."""
    model = Decoder(config)
    for name, value in model.named_parameters():
        given = initial_values(model, seed=seed, name=name, start=0, stop=value.numel())
        value.data.copy_(given.view(value.shape))
    return model.eval()


def draw(process: Process, *, addresses: str, weights: str, config: DecoderConfig = CONFIG) -> tuple[int, bool] | None:
    """Bytes that all ranks of a server have pulled, and whether its answers are those of ranks that began with the weights. On rank 0."""
    opened = Opened(
        name="m", module=model_of(seed=9, config=config), tokenizer=Bytes(), ends=(), vocabulary=config.vocab_size
    )
    expected = Expected.of(opened)
    given = {"policy": InferencePolicy(weights=weights), "comm": process.comm, "open_weights": expected.opened}
    pulls, begins = (Generator(model, **given) for model in (opened.module, model_of(seed=3, config=config)))
    if pulls.follows:
        pulls.follow()
        begins.follow()
        return None
    nbytes = pulls.switch(addresses, version="v1")
    before, after = drawn_by(begins), drawn_by(pulls)
    return nbytes, before == after


def drawn_by(generator: Generator) -> list:
    answers = generator.generate(PROMPTS, sampling=GREEDY)
    generator.close()
    return [(one.tokens, one.logprobs.tolist()) for [one] in answers]


def needed(model: Decoder, *, ranks: int) -> int:
    """Bytes of all values that a server needs: every element once, but norms, and keys and values with fewer heads than ranks, on each rank
    that computes with them."""
    total = 0
    for name, value in model.named_parameters():
        keys = any(part in name for part in ("key", "value"))
        copies = ranks if value.dim() == 1 else max(1, ranks // CONFIG.kv_heads) if keys else 1
        total += copies * value.numel()
    return 4 * total


LAYOUTS = {
    "stage 3": (2, Strategy(stage=3)),
    "stage 3, tp2": (4, Strategy(topology=Topology(tensor=2), stage=3)),
    "stage 1, pp2": (4, Strategy(topology=Topology(pipeline=2), stage=1)),
}


@pytest.mark.parametrize(
    ("layout", "ranks_of_server", "weights"),
    [
        ("stage 3", 1, "stored"),
        ("stage 3", 2, "int8"),
        ("stage 3, tp2", 2, "stored"),
        ("stage 3, tp2", 4, "stored"),
        ("stage 3, tp2", 4, "int8"),
        ("stage 3, tp2", 2, "int4"),
        ("stage 1, pp2", 2, "stored"),
    ],
)
def test_a_server_pulls_its_weights_once(ranks, tmp_path, layout, ranks_of_server, weights):
    world, strategy = LAYOUTS[layout]
    model = model_of(seed=3)
    addresses = ranks(world).run(offer, strategy=strategy, folder=tmp_path)[0]
    nbytes, is_equal = ranks(ranks_of_server).run(draw, addresses=addresses, weights=weights)[0]
    ended = ranks(world).run(end)
    sizes = [4 * value.numel() for value in model.parameters()]
    assert is_equal
    assert sum(held for held, _ in ended) * 4 == sum(sizes)
    floor = needed(model, ranks=ranks_of_server)
    assert nbytes == floor if weights == "stored" else floor <= nbytes < 1.1 * floor + GROUPS
    if ranks_of_server <= CONFIG.kv_heads and weights == "stored":
        assert nbytes < 1.01 * sum(sizes)  # norms alone are pulled by each rank
    # A rank of the trainer makes no copy larger than its own part of a tensor.
    assert max(largest for _, largest in ended) < max(sizes) and max(sizes) < CHUNK_BYTES


@pytest.mark.parametrize("layout", ["stage 3, tp2", "stage 1, pp2"])
def test_a_head_that_is_the_embedding_is_pulled_once(ranks, tmp_path, layout):
    world, strategy = LAYOUTS[layout]
    config = replace(CONFIG, tie_embeddings=True)
    addresses = ranks(world).run(offer, strategy=strategy, folder=tmp_path, config=config)[0]
    nbytes, is_equal = ranks(2).run(draw, addresses=addresses, weights="stored", config=config)[0]
    ranks(world).run(end)
    assert is_equal and nbytes == needed(model_of(seed=3, config=config), ranks=2)


def offered_values(process: Process, *, folder: Path, is_gpu: bool) -> list:
    """The names, boxes and values that a rank at stage 3 offers, read after the engine has stepped on."""
    with on_gpu(process) if is_gpu else nullcontext((process, None)) as (own, _):
        engine = make_bf16_engine(own, layout=Layout(stage=3, offload="none"), dtype="bf16", accumulation_steps=1)
        opens = partial(safe_open, framework="pt")
        shards = Shards(engine, folder=folder, save=save_file, opens=opens, channels=[], timeout_seconds=60)
        shards.publish("v1")
        for shard in engine.zero.state.parameters():
            assert shard.value.device == own.device
            shard.value.zero_()
        values = [(one, one.read()) for one in shards.offer.held]
        found = [(one.name, one.box, one.dtype, value.device.type, value.flatten().tolist()) for one, value in values]
        shards.close()
        engine.close()
    return found


def test_values_of_a_gpu_are_offered_from_main_memory(ranks, tmp_path):
    by_gpu, by_cpu = (
        ranks(2).run(offered_values, folder=tmp_path / name, is_gpu=name == "gpu") for name in ("gpu", "cpu")
    )
    assert by_gpu == by_cpu
    assert all(device == "cpu" for rank in by_gpu for *_, device, _ in rank)
    assert all(sum(any(values) for *_, values in rank) > len(rank) / 2 for rank in by_gpu)  # as before they became 0


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_ranks_of_a_server_read_their_parts_of_files(ranks, tmp_path, weights):
    model = model_of(seed=3)
    save_file({name: value.data for name, value in model.named_parameters()}, tmp_path / "model.safetensors")
    nbytes, is_equal = ranks(2).run(draw, addresses=str(tmp_path), weights=weights)[0]
    assert is_equal and nbytes == needed(model, ranks=2)
