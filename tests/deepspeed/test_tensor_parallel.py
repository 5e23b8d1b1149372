"""tensor_parallel and ZeRO++ by their keys: training and refusals."""

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.parallel.topology import families
from ztk.core.runtime import Process
from ztk.core.runtime.seed import generator
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config

RELATIVE = 1e-5  # another order of summation, over six steps; see tests/parallel/topology/test_layouts.py
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def train(
    process: Process, *, section: dict, zero: dict | None = None, asked: dict | None = None
) -> tuple[list[float], tuple[int, ...]]:
    """Losses, and the shape of a layer on this rank. Every rank reads the same batch, so that data parallelism changes nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **section,
    }
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    if asked is not None:
        model = deepspeed.tp_model_init(model=model, config=config, **asked)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses, tokens = [], torch.randint(1, 64, (2, 12), generator=generator("words", 0))
    for _ in range(6):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    shape = tuple(engine.module.model.layers[0].mlp.up_proj.weight.shape)
    engine.destroy()
    return losses, shape


@pytest.mark.parametrize(
    "section",
    [
        {"autotp_size": 2},
        {"tp": {"tp_size": 2, "tp_grain_size": 1}},
        {"tp_size": 2, "mpu": None, "tp_grain_size": 64},
        {
            "autotp_size": 2,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [r"gate_proj\.weight$", r"up_proj\.weight$"], "partition_type": "column"},
                    {"patterns": [r"down_proj\.weight$"], "partition_type": "row"},
                ],
            },
        },
    ],
    ids=["autotp", "tp", "flat, as the documents have it", "partition_config"],
)
def test_ranks_share_layers_and_train_the_same(ranks, section):
    expected, full = ranks(2).run(train, section={})[0]
    for losses, shape in ranks(2).run(train, section={"tensor_parallel": section, "train_batch_size": 2}):
        assert losses == pytest.approx(expected, rel=RELATIVE)
        assert shape == (full[0] // 2, full[1])


def train_family(process: Process, *, family: str, section: dict) -> tuple[list[float], int]:
    """Losses, and the number of parameters on this rank."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        **section,
    }
    engine, *_ = deepspeed.initialize(model=families.make(family), config=config)
    losses, tokens = [], torch.randint(1, 64, (2, 12), generator=generator("words", 0))
    for _ in range(4):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    engine.destroy()
    return losses, count


@pytest.mark.parametrize("family", ["GPT2", "Bloom"])
def test_decoders_without_a_tp_plan(ranks, family):
    """autotp_size as the document writes it, for a Conv1D and for projections that are fused head by head."""
    expected, full = ranks(2).run(train_family, family=family, section={})[0]
    section = {"tensor_parallel": {"tp_size": 2, "mpu": None, "tp_grain_size": 64}, "train_batch_size": 2}
    for losses, count in ranks(2).run(train_family, family=family, section=section):
        assert losses == pytest.approx(expected, rel=RELATIVE)
        assert count < 0.6 * full


def read_full(process: Process, *, stage: int) -> dict:
    """As OpenRLHF saves a model: every parameter on its own, in both contexts."""
    from tests.deepspeed.hybrid import tiny
    from ztk.deepspeed.zero.gathered import GatherReplacedLayerParams

    model = tiny()
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    same, cut, back = [], 0, []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            part = parameter.detach().clone()
            with GatherReplacedLayerParams([parameter], model, enabled=True):
                same.append(bool(torch.equal(parameter.data, expected[name])))
            back.append(bool(torch.equal(parameter, part)))
            with GatherReplacedLayerParams(parameter, model, enabled=False):
                cut += parameter.shape != expected[name].shape
    batch = torch.arange(2, 14).repeat(2, 1)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    engine.destroy()
    return {"same": all(same), "back": all(back), "cut": cut}


@pytest.mark.parametrize("stage", [0, 3])
def test_cut_layers_are_read_in_full(ranks, stage):
    for found in ranks(2).run(read_full, stage=stage):
        assert found["same"] and found["back"] and found["cut"] > 10


@pytest.mark.parametrize("section", [{}, {"tensor_parallel": {"autotp_size": 2}}], ids=["alone", "and the section"])
def test_tp_model_init_sets_the_number_of_ranks_that_share_layers(ranks, section):
    expected, full = ranks(2).run(train, section={})[0]
    asked = {"tp_size": 2, "dtype": torch.float32}
    for losses, shape in ranks(2).run(train, section=section | {"train_batch_size": 2}, asked=asked):
        assert losses == pytest.approx(expected, rel=RELATIVE)
        assert shape == (full[0] // 2, full[1])


@pytest.mark.parametrize(
    ("asked", "section", "message"),
    [
        ({"tp_size": 2}, {"autotp_size": 4}, r"\[4\] ranks here, and 2 in tp_model_init"),
        (
            {"tp_size": 1, "dtype": torch.bfloat16},
            None,
            "trains in torch.float32, and tp_model_init was given dtype=torch.bfloat16",
        ),
        ({"tp_size": 1, "tp_group": object()}, None, "tp_size determines the groups"),
        ({"tp_size": 0}, None, "must be 1 or more"),
    ],
)
def test_tp_model_init_and_the_configuration_must_agree(asked, section, message):
    config = {"train_batch_size": 1} | ({} if section is None else {"tensor_parallel": section})
    with pytest.raises(ValueError, match=message):
        model = deepspeed.tp_model_init(torch.nn.Linear(2, 2), **{"dtype": torch.float32} | asked)
        deepspeed.initialize(model=model, config=config)


def test_second_shards_change_nothing_and_short_weights_little(ranks):
    expected, _ = ranks(2).run(train, section={})[0]
    near, _ = ranks(2).run(train, section={}, zero={"zero_hpz_partition_size": 2})[0]
    assert near == expected
    short, _ = ranks(2).run(train, section={}, zero={"zero_quantized_weights": True, "zero_quantized_gradients": True})[
        0
    ]
    assert short != expected
    assert short[-1] < expected[0] - 0.5 * (expected[0] - expected[-1])  # it learns half as much or more


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"autotp_size": 3}, "cannot be divided by 3"),
        ({"autotp_size": 2, "tp": {"tp_size": 4}}, "keep one of"),
        ({"tp_size": 2, "mpu": "mine"}, "leave it out"),
        ({"autotp_sice": 2}, "did you mean autotp_size"),
        ({"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["("]}]}}, "needs patterns and"),
        (
            {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["("], "partition_type": "row"}]}},
            "not a regular expression",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(section, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse_config({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": section}, world_size=4)


def test_the_batch_triple_counts_replicas():
    settings = parse_config({"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}, world_size=8)
    assert (settings.batch.train, settings.tensor.degree) == (8, 2)
