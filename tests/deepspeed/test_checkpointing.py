"""deepspeed.checkpointing: the same losses as without, memory that goes, options that act or are refused."""

import json
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.parallel.recompute.models import LiveBytes
from ztk.core.runtime import Process
from ztk.deepspeed.config import DeepSpeedConfigError
from ztk.deepspeed.recompute import checkpointing
from ztk.deepspeed.recompute.checkpointing import checkpoint

STAGES = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def fresh():
    """As in a new process."""
    checkpointing._checkpointing = checkpointing._Checkpointing()
    checkpointing.get_cuda_rng_tracker().reset()


class TransformerLayer(nn.Module):
    """Document 002, section 8, with a mean for its attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16)
        self.attention = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm1(x)) + x


class PlainLayer(TransformerLayer):
    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(28, 16)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.leave = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


# Document 002, section 8: without tensor-parallel ranks there is nothing to partition; the rest acts.
SECTION = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}


def train(process: Process, *, stage: int, section: dict | None) -> dict:
    """The documents' loop over the stack; `section`: None trains the one without checkpoints."""
    checkpointing._checkpointing = checkpointing._Checkpointing()
    torch.manual_seed(0)
    model = Stack(PlainLayer if section is None else TransformerLayer)
    more = {} if section is None else {"activation_checkpointing": section}
    engine, *_ = deepspeed.initialize(model=model, config=scripts.config(stage=stage, **more))
    torch.manual_seed(process.rank)
    losses = scripts.loop(process, engine, steps=12, period=2)
    found = {"losses": losses, "configured": checkpointing.is_configured()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_documents_block_changes_no_bit(ranks, stage):
    plain = ranks(2).run(train, stage=stage, section=None)[0]
    assert plain["losses"][-1] < plain["losses"][0] and not plain["configured"]
    for section in ({}, SECTION):
        found = ranks(2).run(train, stage=stage, section=section)[0]
        assert found["losses"] == plain["losses"] and found["configured"]


def run(kind: type[nn.Module]) -> tuple[list[Tensor], int]:
    """Gradients of a step, and the bytes that its forward leaves."""
    torch.manual_seed(0)
    model = Stack(kind)
    with LiveBytes() as live:
        loss = model(torch.randn(32, 28, generator=torch.Generator().manual_seed(0))).square().mean()
    kept = live.now
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpoint_in_cpu": True, "partition_activations": True},
        {"contiguous_checkpointing": True, "partition_activations": True, "num_checkpoints": 4},
        {"synchronize": True, "profile": True},
        {"contiguous_checkpointing": True},  # as Lightning calls it: no number, so no buffer
        {"num_checkpoints": 4},
    ],
    ids=str,
)
def test_configure(options):
    expected, everything = run(PlainLayer)
    assert not checkpointing.is_configured()
    checkpointing.configure(None, **options)
    found, kept = run(TransformerLayer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Per layer 32 rows of 16: the input. Around the layers: the data [32, 28], the input of the last Linear, and its result twice (the
    # result and its squares are saved); the loss is a number.
    assert kept == 4 * 32 * (4 * 16 + 28 + 16 + 10) + 4 < everything / 3
    assert checkpointing.is_configured()


def test_arguments_outrank_the_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "activation_checkpointing": SECTION}))
    checkpointing.configure(None, deepspeed_config=str(path), checkpoint_in_cpu=False)
    options = checkpointing._checkpointing.options
    assert options.contiguous_memory_optimization and options.number_checkpoints == 4 and not options.cpu_checkpointing
    checkpointing.configure(None)
    assert checkpointing._checkpointing.options == checkpointing.ActivationCheckpointing()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"mpu_": object()}, "get_tensor_model_parallel_group"),
        ({"deepspeed_config": {"activation_checkpointing": {"profiles": True}}}, "did you mean profile"),
    ],
    ids=("mpu_", "misspelt"),
)
def test_what_is_wrong_is_refused(options, fix):
    with pytest.raises(ValueError, match=fix):
        checkpointing.configure(**{"mpu_": None, **options})


def test_a_misspelt_key_is_refused_with_all_other_faults():
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(
            model=nn.Linear(1, 1), config={"activation_checkpointing": {"cpu_checkpoint": True}, "fp_16": {}}
        )
    assert len(caught.value.faults) == 3 and any("cpu_checkpointing" in fault for fault in caught.value.faults)


def test_reset_drops_the_buffer():
    """Forwards whose backward never comes would fill it."""
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    x = torch.ones(3, requires_grad=True)
    kept = [checkpoint(torch.sin, x) for _ in range(2)]
    with pytest.raises(RuntimeError, match="all 2 places"):
        checkpoint(torch.sin, x)
    checkpointing.reset()
    checkpoint(torch.sin, x).sum().backward()
    kept[0].sum().backward()  # graphs that still run keep theirs
    assert torch.equal(x.grad, 2 * torch.cos(torch.ones(3)))
    checkpointing.set_num_layers(1)
    kept = [checkpoint(torch.sin, x)]
    with pytest.raises(RuntimeError, match="all 1 places"):
        checkpoint(torch.sin, x)


def test_outputs_are_as_deepspeeds():
    x = torch.ones(2, requires_grad=True)
    assert isinstance(checkpoint(lambda x: [x * 2], x), Tensor)
    pair = checkpoint(lambda x, *, flag: [x * 2, flag], x, flag=torch.tensor(True))
    assert type(pair) is tuple and pair[0].requires_grad and not pair[1].requires_grad
    outputs: list = []
    assert checkpointing.CheckpointFunction.apply(lambda x, y: (x + y, y), outputs, x, x)[0] is outputs[0]
    checkpointing.non_reentrant_checkpoint(F.silu, x).sum().backward()
    assert x.grad is not None


def test_named_random_states_are_drawn_again():
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()

    def noisy(x: Tensor) -> Tensor:
        with tracker.fork():
            inside = torch.rand(x.shape)
        return x * x * inside * torch.rand(x.shape)

    def gradient(run) -> Tensor:
        checkpointing.model_parallel_cuda_manual_seed(7)
        x = torch.ones(8, requires_grad=True)
        out = run(noisy, x)
        with tracker.fork():
            torch.rand(3)  # the state has moved on when the backward comes
        out.sum().backward()
        after = tracker.get_states()["model-parallel-rng"]
        return torch.cat([x.grad, after.float()])

    assert torch.equal(gradient(checkpoint), gradient(lambda function, x: function(x)))


def test_the_tracker_refuses_states_that_would_repeat_draws():
    tracker = checkpointing.CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("one", 1)
    for name, seed, fix in (("two", 1, "seed 1 already exists"), ("one", 2, "one already exists")):
        with pytest.raises(ValueError, match=fix):
            tracker.add(name, seed)
    with pytest.raises(ValueError, match="is not added"), tracker.fork("other"):
        pass
    with tracker.fork("one"):
        first = torch.rand(2)
    with tracker.fork("one"):
        second = torch.rand(2)
    assert not torch.equal(first, second) and torch.equal(torch.get_rng_state(), before)
    tracker.set_states(tracker.get_states())
    checkpointing.model_parallel_cuda_manual_seed(3)
    start = checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    checkpointing.model_parallel_reconfigure_tp_seed(3)
    assert torch.equal(checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"], start)


def test_profile_logs_milliseconds(caplog):
    checkpointing.configure(None, profile=True)
    with caplog.at_level(logging.INFO, logger="ztk.deepspeed"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1] for line in lines] == [" forward", " recomputed forward"]


class Mpu:
    """All ranks are tensor-parallel to each other."""

    def get_model_parallel_group(self):
        return torch.distributed.group.WORLD


def partitioned(process: Process, *, in_cpu: bool) -> dict:
    """The same batch on both ranks."""
    checkpointing._checkpointing = checkpointing._Checkpointing()
    expected, _ = run(PlainLayer)
    checkpointing.configure(Mpu(), partition_activations=True, checkpoint_in_cpu=in_cpu)
    found, kept = run(TransformerLayer)
    checkpointing.partition_activations_in_checkpoint(False)
    _, full = run(TransformerLayer)
    checkpointing.model_parallel_cuda_manual_seed(5)
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(1).item()
    checkpointing._checkpointing = checkpointing._Checkpointing()
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return {"same": same, "saved": full - kept, "drawn": drawn}


@pytest.mark.parametrize("in_cpu", [False, True])
def test_inputs_are_partitioned_over_the_ranks_of_an_mpu(ranks, in_cpu):
    first, second = ranks(2).run(partitioned, in_cpu=in_cpu)
    assert first["same"] and second["same"]
    assert first["saved"] == 4 * 32 * 4 * 16 // 2  # half of the four inputs
    assert first["drawn"] != second["drawn"]


def test_the_modules_have_deepspeeds_names():
    from ztk.deepspeed.names.tree import module_of

    assert module_of("deepspeed.runtime.activation_checkpointing").checkpointing is checkpointing
    assert deepspeed.checkpointing is checkpointing
