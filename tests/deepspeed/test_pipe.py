"""DeepSpeed's pipeline scripts: the documents' scripts, topologies by arithmetic, and one stage compared with several."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from ztk.deepspeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from ztk.deepspeed.pipe.pipeline_engine import PipelineError

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH, MICRO = 30, 16, 6, 8, 1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallPipeline(PipelineModule):
    """As GPT2PipelineModel of the documents: specs, a tied head, its own loss."""

    def __init__(self, **options) -> None:
        embedding = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        head = TiedLayerSpec(
            "embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=lambda module, x: F.linear(x, module.weight)
        )
        layers = [embedding, *(LayerSpec(Block, WIDTH) for _ in range(4)), head]
        super().__init__(layers=layers, loss_fn=loss_fn, seed_layers=True, base_seed=42, **options)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(replica: int, *, replicas: int):
    """The replica's micro-batches of one global batch after the other, for ever."""
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
        for row in rows.chunk(replicas)[replica].split(MICRO):
            yield row[:, :-1], row[:, 1:]


def config(*, stage: int, **more) -> dict:
    made = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_type": "linear"},
        },
    }
    return made | more


def script(
    process,
    *,
    stages: int,
    stage: int,
    more: dict,
    steps: int = 4,
    folder: str | None = None,
    resume: str | None = None,
) -> dict:
    model = SmallPipeline(num_stages=stages)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, config=config(stage=stage, **more), model_parameters=list(model.parameters())
    )
    replica, replicas = engine.grid.get_data_parallel_id(), engine.grid.get_data_parallel_world_size()
    data = batches(replica, replicas=replicas)
    if resume is not None:
        engine.load_checkpoint(resume)
        for _ in range(engine.micro_steps):
            next(data)
    losses = [engine.train_batch(data_iter=data).item() for _ in range(steps)]
    reads = engine.is_first_stage() or engine.is_last_stage()
    held_out = batches(replica, replicas=replicas) if reads else None
    loss, logits = engine.eval_batch(held_out, return_logits=True)
    found = {
        "losses": losses,
        "validation": loss.item(),
        "logits": None if logits[0] is None else tuple(logits[0].shape),
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "lr": engine.get_lr(),
        "world": (engine.dp_world_size, engine.gradient_accumulation_steps(), engine.train_batch_size()),
        "names": sorted(name for name, _ in model.named_parameters()),
        "parts": model.parts,
    }
    for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)), engine.step):
        with pytest.raises(PipelineError, match="train_batch"):
            call()
    if folder is not None:
        engine.save_checkpoint(folder)
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def alone(ranks) -> dict:
    return ranks(1).run(script, stages=1, stage=0, more={})[0]


@pytest.mark.parametrize(
    ("world", "stages", "stage", "more"),
    [
        (2, 2, 1, {"pipeline": {"activation_checkpoint_interval": 1, "seed_layers": True}}),
        (2, 1, 2, {}),
        (4, 2, 3, {"pipeline": {"activation_checkpoint_interval": 2}}),
        (4, 4, 3, {}),
    ],
)
def test_scripts_train_alike_on_any_number_of_stages(ranks, alone, world, stages, stage, more):
    """DeepSpeed refuses pipelines with stages 2 and 3; here they are the same numbers. Tolerance as in tests/parallel/pipeline."""
    runs = ranks(world).run(script, stages=stages, stage=stage, more=more)
    for run in runs:
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert run["validation"] == pytest.approx(alone["validation"], rel=1e-5)
        assert (run["steps"], run["samples"], run["lr"]) == (4, 4 * GLOBAL_BATCH, alone["lr"])
        replicas = world // stages
        assert run["world"] == (replicas, GLOBAL_BATCH // replicas, GLOBAL_BATCH)
    assert runs[-1]["logits"] == (MICRO, LENGTH, VOCABULARY)
    assert runs[0]["logits"] is None or stages == 1
    assert {name for run in runs for name in run["names"]} == set(alone["names"])
    assert "tied_modules.embed.weight" in runs[0]["names"]
    assert "1.norm.weight" in alone["names"]


def test_checkpoints_go_on_with_another_number_of_stages(ranks, alone, tmp_path):
    ranks(2).run(script, stages=2, stage=2, more={}, steps=2, folder=str(tmp_path))
    (found,) = ranks(1).run(script, stages=1, stage=0, more={}, steps=2, resume=str(tmp_path))
    assert found["losses"] == pytest.approx(alone["losses"][2:], rel=1e-5)
    assert (found["steps"], found["lr"]) == (4, alone["lr"])


class Rows(torch.utils.data.Dataset):
    """The rows of one global batch, over and over."""

    def __init__(self) -> None:
        self.rows = torch.randint(VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def own_data(process) -> list[float]:
    """`train_batch()` without an iterator, as in the documents; a batch that needs a function to be (inputs, labels)."""
    model = SmallPipeline(topology=PipeDataParallelTopology(num_pp=2, num_dp=1), partition_method="type:block")
    engine, optimizer, loader, _ = deepspeed.initialize(model=model, config=config(stage=1), training_data=Rows())
    engine.set_batch_fn(lambda rows: (rows[:, :-1], rows[:, 1:]))
    assert len(loader) == GLOBAL_BATCH // MICRO
    losses = [engine.train_batch().item() for _ in range(4)]
    last = [loss.item() for loss in engine.eval_batch(iter(loader), reduce_output=None, num_micro_batches=2) or ()]
    assert len(last) == 2 * engine.is_last_stage()
    outputs = engine.eval_batch(iter(loader), compute_loss=False, num_micro_batches=1)
    assert (outputs[0] is None) is not engine.is_last_stage()
    engine.destroy()
    return losses


def test_data_given_to_initialize(ranks):
    first, second = ranks(2).run(own_data)
    assert first == second
    assert first[3] < first[0]  # the warm-up's first rate is zero


def refusals(process) -> list[str]:
    messages = []
    specs = [LayerSpec(Block, WIDTH) for _ in range(4)]
    for options in (
        {},
        {"num_stages": 3},
        {"topology": PipeDataParallelTopology(num_pp=2, num_dp=2)},
        {"topology": PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)},
        {"num_stages": 1, "topology": PipeDataParallelTopology(num_pp=2, num_dp=1)},
        {"num_stages": 2, "partition_method": "profile"},
        {"num_stages": 2, "partition_method": "evenly"},
    ):
        with pytest.raises(ValueError) as caught:
            PipelineModule(layers=specs, **options)
        messages.append(str(caught.value))
    model = PipelineModule(
        layers=specs, topology=PipeDataParallelTopology(num_pp=2, num_dp=1), partition_method="uniform"
    )
    assert [model.stage_owner(layer) for layer in range(4)] == [0, 0, 1, 1]
    return messages


def test_refusals_name_the_fix(ranks):
    words = (
        "num_stages or topology",
        "does not divide the 2 ranks",
        "2 ranks in all",
        "num_mp=1",
        "keep one",
        "must be",
        "must be",
    )
    for messages in ranks(2).run(refusals):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages


def test_topologies_are_grids():
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert [topology.get_rank(pipe=p, data=d) for p in range(2) for d in range(3)] == list(range(6))
    assert topology.get_coord(4) == (1, 1)
    assert (topology.get_dim("pipe"), topology.get_dim("model"), topology.world_size()) == (2, 0, 6)
    assert topology.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert topology.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert topology.get_axis_comm_lists("model") == []
    assert topology.filter_match(pipe=1) == topology.get_axis_list("pipe", 1) == [3, 4, 5]
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_names() == ["pipe", "data", "model"]
    assert three.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert three.get_rank_repr(7) == "model_01"
    with pytest.raises(ValueError, match="name each of"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match="different names"):
        ProcessTopology(axes=["a", "a"], dims=[1, 1])


def test_names_are_where_scripts_import_them_from():
    assert deepspeed.PipelineModule is PipelineModule
    assert deepspeed.pipe.LayerSpec is LayerSpec


def recomputed(process, *, options: dict) -> dict:
    """An embedding with integer inputs: without a gradient of the input it is not recomputed."""
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *(LayerSpec(Block, WIDTH) for _ in range(3))]
    head = LayerSpec(nn.Linear, WIDTH, VOCABULARY)
    model = PipelineModule([*layers, head], num_stages=process.world_size, loss_fn=loss_fn, seed_layers=True, **options)
    runs = []
    for index, layer in model.named_children():
        layer.register_forward_hook(lambda module, inputs, output, index=index: runs.append(index))
    engine = deepspeed.initialize(model=model, config=config(stage=1))[0]
    data = batches(0, replicas=1)
    losses = [engine.train_batch(data_iter=data).item() for _ in range(3)]
    found = {"losses": losses, "runs": runs.count("0"), "weights": engine.module_state_dict()}
    found["interval"] = engine.module.activation_checkpoint_interval
    engine.module.set_checkpoint_interval(0)
    engine.train_batch(data_iter=data)
    found["runs plainly"] = runs.count("0") - found["runs"]
    engine.destroy()
    return found


@pytest.mark.parametrize("function", [None, "checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_recompute_interval_may_begin_with_an_embedding(ranks, world, function):
    """DeepSpeed's first interval has no input that requires a gradient, and its reentrant function then trains nothing in it."""
    options: dict = {"activation_checkpoint_interval": 2}
    if function:
        options["activation_checkpoint_func"] = getattr(deepspeed.checkpointing, function)
    plainly, again = (ranks(world).run(recomputed, options=given)[0] for given in ({}, options))
    assert again["losses"] == plainly["losses"] and again["losses"][-1] < again["losses"][0]
    assert again["runs"] == 2 * plainly["runs"] == 2 * 3 * GLOBAL_BATCH
    assert (again["interval"], again["runs plainly"]) == (2, GLOBAL_BATCH)  # after set_checkpoint_interval(0)
    assert again["weights"].keys() == plainly["weights"].keys()
    assert all(torch.equal(value, plainly["weights"][name]) for name, value in again["weights"].items())
