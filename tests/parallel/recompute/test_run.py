"""`run.py recompute=...`: the same bits for every stage, tier and peer, and the computed bytes."""

import pytest

from ztk.config import ConfigError, Machine, compose
from ztk.core.runtime import MemoryLedger, Process, Tier
from ztk.experiments import policies, pretrain
from ztk.experiments.streams import open_stream

SMALL = (
    "model.dim=48",
    "model.layers=4",
    "model.heads=4",
    "model.kv_heads=2",
    "model.hidden_dim=64",
    "model.max_seq_len=32",
)
RUN = (
    *SMALL,
    "data=synthetic",
    "data.seq_len=32",
    "train.micro_batch_size=2",
    "train.steps=4",
    "logger=disabled",
    "launch.ranks=2",
)
INPUT = 2 * 32 * 48  # elements of a block's input
MACHINE = Machine(gpus=0, cores=2)


def configured(*overrides: str):
    return compose(*RUN, *overrides, output_dir="/run", machine=MACHINE)


def trained(process: Process, *, overrides: tuple[str, ...]) -> dict:
    """Losses and norms of this rank, and the bytes of saved inputs at their most."""
    config = configured(*overrides)
    process = process.arrange(policies.topology(config))
    engine = pretrain.build_engine(config, process=process)
    inputs = watched(engine.memory)
    stream = open_stream(config, corpus=None, process=process)
    rows = []
    for step in range(1, config.train.steps + 1):
        loss = pretrain.train_step(config, step, engine=engine, stream=stream)
        rows += [loss.item(), engine.read_metrics().grad_norm]
    engine.close()
    return {"rows": rows, "inputs": inputs}


def watched(ledger: MemoryLedger) -> dict[Tier, int]:
    """Follows the most bytes that saved inputs ever had."""
    most, add = {Tier.device: 0, Tier.host: 0}, ledger.add

    def added(**entry) -> None:
        add(**entry)
        for tier in most:
            most[tier] = max(most[tier], ledger.by_category(tier).get("recompute inputs", 0))

    ledger.add = added
    return most


CASES = {
    ("zero=stage0", "precision=fp32"): ["full", "selective", "every2"],
    ("zero=stage2", "precision=fp16"): ["full", "selective"],
    ("zero=stage3", "precision=bf16"): ["full", "selective", "every2"],
    ("zero=stage3", "offload=cpu", "precision=bf16"): ["full"],
    ("topology=pp2", "zero=stage2", "precision=fp32", "train.accumulation_steps=4"): ["full", "selective"],
    ("zero=ddp", "precision=fp32"): ["full", "selective"],
    ("zero=fsdp2", "precision=bf16"): ["full", "selective"],
}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_bit_is_as_without(ranks, case):
    plain = ranks(2).run(trained, overrides=case)
    for option in CASES[case]:
        found = ranks(2).run(trained, overrides=(*case, f"recompute={option}"))
        assert [rank["rows"] for rank in found] == [rank["rows"] for rank in plain]


@pytest.mark.parametrize(
    ("overrides", "tier", "expected"),
    [
        (("recompute=full", "precision=bf16"), Tier.device, 4 * INPUT * 2),
        (("recompute=every2", "precision=fp32"), Tier.device, 2 * INPUT * 4),
        (("recompute=full", "precision=bf16", "recompute.inputs_on_cpu=true"), Tier.host, 4 * INPUT * 2),
        (("recompute=full", "precision=bf16", "recompute.contiguous=true", "recompute.num_checkpoints=6"), Tier.device, 6 * INPUT * 2),
    ],
    ids=str,
)  # fmt: skip
def test_the_saved_inputs_have_the_computed_bytes(ranks, overrides, tier, expected):
    other = Tier.host if tier is Tier.device else Tier.device
    for rank in ranks(2).run(trained, overrides=("zero=stage3", *overrides)):
        assert rank["inputs"] == {tier: expected, other: 0}


TENSORS = ("topology=tp2", "zero=stage3", "precision=fp32")


@pytest.mark.parametrize("more", [(), ("recompute.inputs_on_cpu=true",)], ids=str)
def test_tensor_parallel_ranks_share_the_inputs(ranks, more):
    plain = ranks(2).run(trained, overrides=TENSORS)
    assert plain[0]["rows"] == plain[1]["rows"]
    found = ranks(2).run(trained, overrides=(*TENSORS, "recompute=full", "recompute.partition_inputs=true", *more))
    assert [rank["rows"] for rank in found] == [rank["rows"] for rank in plain]
    tier = Tier.host if more else Tier.device
    assert all(rank["inputs"][tier] == 4 * INPUT * 4 // 2 for rank in found)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("recompute.every=2", "only with recompute=full"),
        ("recompute.inputs_on_cpu=true", "only with recompute=full"),
        ("recompute=some", "only every2, full, none, selective"),
    ],
)
def test_what_cannot_act_is_refused(override, fix):
    with pytest.raises(ConfigError, match=fix):
        configured(override)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("recompute.every=0", "must be 1 or more"),
        ("recompute.num_checkpoints=4", "only with recompute.contiguous=true"),
        ("recompute.partition_inputs=true", "topology.tensor above 1"),
        ("recompute.evry=2", "did you mean recompute.every"),
    ],
)
def test_options_of_recomputation_are_checked(override, fix):
    with pytest.raises(ConfigError, match=fix):
        configured("recompute=full", override)
