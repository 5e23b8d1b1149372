"""docs/fsdp.md: its two scripts train alike, and all names in its table exist."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.documents.harness import Run
from tests.documents.harness import run as run_block
from ztk.core.runtime import Process

PAGE = (Path(__file__).parents[2] / "docs" / "fsdp.md").read_text()
BEFORE, AFTER = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(28, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 33), nn.GELU(), nn.Linear(33, 32)) for _ in range(3)
        )
        self.leave = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def batches(process: Process, *, steps: int):
    """Two batches in turn, a part for each rank."""
    for step in range(steps):
        x = torch.randn(8, 28, generator=torch.Generator().manual_seed(step % 2))
        x = x.chunk(process.world_size)[process.rank]
        yield x, x[:, :10].argmax(1)


def run(process: Process, *, script: str) -> tuple[list[float], dict]:
    """`train` of a script of the page: the ranks' mean losses, and the weights."""
    torch.manual_seed(0)
    namespace: dict = {}
    exec(compile(script, "docs/fsdp.md", "exec"), namespace)
    losses, weights = namespace["train"](Stack(), batches(process, steps=12))
    return process.comm.gather_scalars(torch.tensor(losses), label="losses").mean(0).tolist(), weights


def test_the_script_before_and_after(documents):
    losses, weights = documents.run(run, script=BEFORE)[0]
    found, after = documents.run(run, script=AFTER)[0]
    assert losses[-1] < 0.5 * losses[0]
    # The ranks' sums are taken in another order than by gloo, so the last bits differ, and AdamW's first steps are as large as lr
    # wherever a gradient is near zero.
    assert found == pytest.approx(losses, abs=1e-5)
    assert after.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(after[name].view(-1), value.view(-1), rtol=0, atol=1e-5)


COMMON = {
    "from torch.distributed.fsdp.wrap import auto_wrap\n": "",  # torch has no such name
    'dist.init_process_group("nccl")\ntorch.cuda.set_device(dist.get_rank())\n': "",
    ".cuda()": "",
    "(0, 50257,": "(0, 64,",
    "range(1)": "range(8)",
    "# 더미 입력": "losses = []\ntorch.manual_seed(0)",
    "loss = outputs.loss\n": "loss = outputs.loss\n    losses.append(loss.item())\n",
}
PLAIN = {"model = FSDP(model)": "pass"}
# The page's changes, with torch's defaults for AdamW.
PORTED = {
    "import torch\n": "import torch\nimport ztk\n",
    "model = FSDP(model)": """model = ztk.parallelize(
    model,
    process=ztk.Process.start(),
    zero=ztk.ZeroPolicy(stage=3),
    optimizer=ztk.OptimizerPolicy(lr=5e-5, betas=(0.9, 0.999), weight_decay=0.01, decay_all=True),
)""",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)\n": "",
    "    optimizer.zero_grad()\n": "",
    "loss.backward()": "model.backward(loss)",
    "optimizer.step()": "model.step()",
}


def test_document_001_1(documents):
    """Its FSDP block, ported as on the page, compared with the block without FSDP."""
    found = []
    for changes in (PORTED, PLAIN):
        work = Run(
            block="001_1_fsdp.py",
            names="hub",
            options={"positions": 128},
            replace={**changes, **COMMON},
            keep=("losses",),
        )
        result = documents.run(run_block, work=work)[0]
        assert result.error is None, result.error
        found.append(result.kept["losses"])
    assert found[0] == pytest.approx(found[1], abs=1e-5) and found[0][-1] < 0.999 * found[0][0]


def test_reshard_after_forward_false(documents):
    """The table's row for SHARD_GRAD_OP: parameters are gathered once per step."""
    counts = documents.run(gathers, options={})[0], documents.run(gathers, options={"max_reuse_distance": 10**12})[0]
    assert counts[1] < counts[0]


def gathers(process: Process, *, options: dict) -> int:
    import ztk

    torch.manual_seed(0)
    zero = ztk.ZeroPolicy(stage=3, max_live_parameters=10**12, **options)
    engine = ztk.parallelize(Stack(), process=process, zero=zero, optimizer=ztk.OptimizerPolicy())
    for x, y in batches(process, steps=4):
        engine.backward(nn.functional.cross_entropy(engine(x), y))
        engine.step()
    return process.comm.counters.elements["all_gather"]


@pytest.mark.parametrize("kind", ["FullyShardedDataParallel", "fully_shard"])
def test_every_option_is_in_the_table(kind):
    """An option that torch adds is missed here."""
    import inspect

    import torch.distributed.fsdp as fsdp

    options = list(inspect.signature(getattr(fsdp, kind)).parameters)
    enums = [*fsdp.ShardingStrategy.__members__, *fsdp.StateDictType.__members__] if kind != "fully_shard" else []
    fields = [name for name in getattr(fsdp.MixedPrecision, "__dataclass_fields__", {}) if not name.startswith("_")]
    policy = list(fsdp.MixedPrecisionPolicy.__dataclass_fields__) if kind == "fully_shard" else fields
    # Said by the example itself, or placing within the device.
    elsewhere = {"module", "shard_placement_fn", "sharding_strategy", "_HYBRID_SHARD_ZERO2", "dp_mesh_dims"}
    named = itertools.chain(options, enums, policy)
    assert not [name for name in named if name not in PAGE and name not in elsewhere]
