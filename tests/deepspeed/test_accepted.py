"""ds_config keys that DeepSpeed's users write and ztk accepts with a note: each has the effect that its author expects."""

import base64
import json
import re
from random import Random

import pytest

from ztk.deepspeed.config import DeepSpeedConfigError, Settings, parse_config, read_source
from ztk.deepspeed.config.source import parse_hjson


def parse(**config) -> Settings:
    return parse_config({"train_batch_size": 8, **config}, world_size=2)


def zero(**section) -> dict:
    return {"zero_optimization": section}


def off(**more) -> dict:
    return {"device": "cpu", **more}


NVME = {"device": "nvme", "nvme_path": "/nowhere/to/be/made"}

# (configuration, a part of the note, the expression of the effect, the effect)
ACCEPTED = {
    "offload_param at stage 2": (
        zero(stage=2, offload_param=off(), offload_optimizer=off()),
        "offload_param.device=cpu: acts at stage 3; this is stage 2",
        lambda made: (made.offload.parameters, made.offload.optimizer),
        ("none", "cpu"),
    ),
    "offload_param at stage 0": (
        zero(stage=0, offload_param=off(pin_memory=True)),
        "offload_param.device=cpu: acts at stage 3; this is stage 0",
        lambda made: made.offload.parameters,
        "none",
    ),
    "offload_param at stage 3 acts": (
        zero(stage=3, offload_param=off(nvme_path="/x")),
        "offload_param.nvme_path='/x': has no effect with device=cpu",
        lambda made: made.offload.parameters,
        "cpu",
    ),
    "the path of an offload_param that does not act": (
        zero(stage=2, offload_param=NVME, offload_optimizer={"device": "nvme", "nvme_path": "/other"}),
        "offload_param.device=nvme: acts at stage 3",
        lambda made: made.offload.nvme_path,
        "/other",
    ),
    "grad_accum_dtype null": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": None}},
        "data_types.grad_accum_dtype=None: stands for the default",
        lambda made: made.precision,
        parse(bf16={"enabled": True}).precision,
    ),
    "number_checkpoints alone": (
        {"activation_checkpointing": {"number_checkpoints": 4}},
        "number_checkpoints=4: has no effect without contiguous_memory_optimization",
        lambda made: made.activation_checkpointing.buffer_size,
        None,
    ),
    "the contiguous buffer alone": (
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "cpu_checkpointing": True}},
        "contiguous_memory_optimization=True: allocates no buffer without number_checkpoints",
        lambda made: (made.activation_checkpointing.buffer_size, made.activation_checkpointing.cpu_checkpointing),
        (None, True),
    ),
    "nvme_path with device cpu": (
        zero(stage=2, offload_optimizer=off(nvme_path="/local_nvme")),
        "offload_optimizer.nvme_path='/local_nvme': has no effect with device=cpu",
        lambda made: (made.offload.optimizer, made.offload.nvme_path),
        ("cpu", None),
    ),
    "a ratio without offload": (
        zero(stage=3, offload_optimizer={"device": "none", "ratio": 0.4}),
        "offload_optimizer.ratio: has no effect with device=none",
        lambda made: made.offload.optimizer_fraction,
        1.0,
    ),
    "differing pin_memory": (
        zero(stage=3, offload_optimizer=off(pin_memory=False), offload_param=off(pin_memory=True)),
        "pin_memory: is true in one offload section and false in the other; both are pinned",
        lambda made: made.offload.pin_memory,
        True,
    ),
    "1 for true": (
        {"bf16": {"enabled": 1}},
        "bf16.enabled=1: stands for true",
        lambda made: made.precision.dtype.itemsize,
        2,
    ),
    "0 for false": (
        {"fp16": {"enabled": 0}, "wall_clock_breakdown": 1},
        "fp16.enabled=0: stands for false",
        lambda made: (made.precision.dtype.itemsize, made.wall_clock_breakdown),
        (4, True),
    ),
    "0 for a false that is as always": (
        {"disable_allgather": 0},
        "disable_allgather=0: stands for false",
        lambda made: made.zero,
        parse().zero,
    ),
    "null for a number": (
        {"fp16": {"enabled": True, "initial_scale_power": None, "hysteresis": None}},
        "fp16.initial_scale_power=None: stands for the default",
        lambda made: made.precision,
        parse(fp16={"enabled": True}).precision,
    ),
    "null for clipping": (
        {"gradient_clipping": None},
        "gradient_clipping=None: stands for the default, which clips at 1.0; write 0 for no clipping",
        lambda made: made.gradient_clipping,
        1.0,
    ),
    "null for a section": (
        {"zero_optimization": None, "bf16": None, "checkpoint": None, "aio": None},
        "zero_optimization=None: stands for the default",
        lambda made: (made.zero, made.precision, made.offload),
        (parse().zero, parse().precision, parse().offload),
    ),
    "null for options without support": (
        zero(stage=1, ignore_unused_parameters=None),
        "ignore_unused_parameters=None: stands for the default",
        lambda made: made.zero.stage,
        1,
    ),
    "null for a device": (
        zero(stage=3, offload_optimizer={"device": None}),
        "offload_optimizer.device=None: stands for the default",
        lambda made: made.offload.optimizer,
        "none",
    ),
    "enable_sanity_checks": (
        zero(stage=3, enable_sanity_checks=True),
        "enable_sanity_checks=True: ztk always checks",
        lambda made: made.zero.stage,
        3,
    ),
    "legacy_stage1": (
        zero(stage=1, legacy_stage1=True),
        "legacy_stage1=True: there is one stage 1",
        lambda made: made.zero,
        parse(**zero(stage=1)).zero,
    ),
    "load_from_fp32_weights": (
        zero(stage=2, load_from_fp32_weights=False),
        "load_from_fp32_weights=False: a checkpoint's fp32 weights are always loaded",
        lambda made: made.zero.stage,
        2,
    ),
    "stage3_ sizes below stage 3": (
        zero(stage=1, stage3_prefetch_bucket_size=10),
        "stage3_prefetch_bucket_size: acts at stage 3; this is stage 1",
        lambda made: made.zero,
        parse(**zero(stage=1)).zero,
    ),
    "stage3_ keys below stage 3 that are not offered": (
        zero(stage=2, stage3_model_persistence_threshold=10, stage3_use_all_reduce_for_fetch_params=True),
        "stage3_use_all_reduce_for_fetch_params=True: acts at stage 3; this is stage 2",
        lambda made: made.zero,
        parse(**zero(stage=2)).zero,
    ),
    "a field without its prefix": (
        zero(stage=3, prefetch_bucket_size=10, gather_16bit_weights_on_model_save=True, max_live_parameters="auto"),
        "prefetch_bucket_size: is read as stage3_prefetch_bucket_size",
        lambda made: (made.zero.prefetch_bucket_size, made.gathers_on_save),
        (10, True),
    ),
    "a field without its prefix below stage 3": (
        zero(stage=2, param_persistence_threshold=10),
        "stage3_param_persistence_threshold: acts at stage 3; this is stage 2",
        lambda made: made.zero,
        parse(**zero(stage=2)).zero,
    ),
    "aio inside zero_optimization": (
        zero(stage=3, offload_param=NVME, aio={"block_size": 1 << 20, "intra_op_parallelism": 3}),
        "zero_optimization.aio: is read as aio",
        lambda made: (made.offload.block_bytes, made.offload.threads),
        (1 << 20, 3),
    ),
    "thread_count": (
        {**zero(stage=3, offload_param=NVME), "aio": {"thread_count": 2}},
        "aio.thread_count: is read as intra_op_parallelism",
        lambda made: made.offload.threads,
        2,
    ),
    "thread_count without nvme": (
        {"aio": {"thread_count": 1}},
        "aio: without effect while nothing is offloaded to nvme",
        lambda made: made.offload,
        parse().offload,
    ),
    "the documents' moe": (
        {"moe_expert_parallel_size": 2, "moe": {"enabled": True, "ep_size": 2, "moe_param_group": True}},
        "moe.moe_param_group=True: experts may be in any parameter group",
        lambda made: made.experts.size,
        2,
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_with_a_note(case):
    config, note, effect, expected = ACCEPTED[case]
    made = parse(**config)
    assert any(note in line for line in made.notes), made.notes
    assert effect(made) == expected


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (zero(stage=3, max_live_parameters=5, stage3_max_live_parameters=6), "is another name of stage3_max_live_parameters"),
        (zero(stage=2, prefetch_bucket_sise=5), "did you mean"),
        (zero(stage=2, offload_param={"device": "nvme"}), "nvme_path: is missing"),
        (zero(stage=2, legacy_stage1="yes"), "must be true or false"),
        (zero(stage=2, overlap_comm=2), "must be true or false"),
        ({"bf16": {"enabled": 1.0}}, "must be true or false"),
        ({"disable_allgather": 1}, "disable_allgather=True: not offered"),
        ({"aio": {"thread_count": 2, "intra_op_parallelism": 3}}, "is another name of intra_op_parallelism"),
        ({"aio": {"thread_count": 10**7}}, "aio.thread_count=10000000: must be a whole number, 1 or more and at most 1024"),
        ({"steps_per_print": 1e308}, "steps_per_print=1e+308: must be a whole number, 1 or more and at most 9223372036854775807; or null"),
        ({"steps_per_print": -1}, "or null for never"),
        ({"train_batch_size": "\u0664"}, "must be a number"),
        ({"aio": {"thread_count": 0}}, "aio.thread_count=0: must be a whole number, 1 or more"),
        ({**zero(stage=3, aio={"block_size": 1}), "aio": {"block_size": 2}}, "differs from aio at the top level"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}}, "total_num_steps: is missing"),
        ({"moe": {"ep_sise": 2}}, "did you mean ep_size"),
        ({"moe": {"ep_size": 1}, "moe_expert_parallel_size": 2}, "moe.ep_size=1 differs"),
        ({"moe": {"enabled": False}, "moe_expert_parallel_size": 2}, "moe.enabled is false"),
        ({"moe": {"ep_size": 3}}, "moe.ep_size=3: 2 data-parallel ranks cannot be divided by 3"),
        (
            {"moe": {"ep_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}},
            "expert_parallel.autoep_size=4 and moe.ep_size=2: keep one",
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_contradictions_and_numbers_without_sense_stay_refused(config, part):
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse(**config)
    assert any(part in fault for fault in caught.value.faults), caught.value.faults


HJSON = """
# no braces around it
train_batch_size: 8   // all ranks
"zero_optimization": {
  stage: 3, reduce_bucket_size: 5e5
  offload_optimizer: {
    device: nvme
    nvme_path: /local/nvme#1
    pin_memory: true /* page-locked */ }
}
bf16: {enabled: true}, optimizer: {type: 'AdamW', params: {lr: 1e-3, betas: [0.9
  0.95,
]}}
tensorboard: {
  enabled: false
  job_name:
    '''
    two
      lines
    '''
}
"""
AS_JSON = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e5,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local/nvme#1", "pin_memory": True},
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "tensorboard": {"enabled": False, "job_name": "two\n  lines"},
}


def test_hjson(tmp_path):
    path = tmp_path / "ds_config.hjson"
    path.write_text(HJSON)
    assert read_source(path) == AS_JSON
    settings = parse_config(path, world_size=2)
    assert any("is read as Hjson; line 3" in note for note in settings.notes)
    assert settings.offload.nvme_path == "/local/nvme#1" and settings.optimizer.betas == (0.9, 0.95)
    coded = base64.urlsafe_b64encode(b"{train_batch_size: 8\n}").decode()
    assert read_source(coded) == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1, column 1"),
        ('{"a": 1 "b": 2}', "line 1, column 9: Expecting ',' delimiter"),
        ("a: 1\nb: 2\na: 3", "line 3, column 2: a is given twice"),
        ("{a: 1", "line 1, column 2"),
        ("a: '''text", "line 1, column 4: ''' has no end"),
        ("a: 1 }", "line 1, column 6: expected a comma or the end of the line"),
        ("{a: 1}\nb: 2", "line 1, column 2"),
        ("# x\n- 1", "line 2, column 3: expected : after -"),
    ],
)
def test_what_is_neither_is_refused_with_its_place(tmp_path, text, reason):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(DeepSpeedConfigError, match=re.escape(reason)):
        read_source(path)


def test_a_misspelt_word_of_hjson_is_refused_by_its_key(tmp_path):
    path = tmp_path / "ds_config.hjson"
    path.write_text("train_batch_size: 8\nbf16: {\n  enabled: ture\n}\ngradient_cliping: 1")
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse_config(path, world_size=2)
    assert len(caught.value.faults) == 2
    assert any("bf16.enabled='ture': must be true or false" in fault for fault in caught.value.faults)


def drawn(random: Random, *, depth: int = 0) -> object:
    """A value of JSON, with texts that look like its punctuation."""
    kinds = ("text", "number", "word") if depth == 4 else ("text", "number", "word", "list", "object", "object")
    match random.choice(kinds):
        case "text":
            return "".join(random.choices("ab \"'\\{}[],:#/*\n\té1", k=random.randrange(8)))
        case "number":
            return random.choice([0, -1, 7, 10**20, 0.5, -2e-7, 3e8])
        case "word":
            return random.choice([True, False, None])
        case "list":
            return [drawn(random, depth=depth + 1) for _ in range(random.randrange(4))]
    keys = ("".join(random.choices("ab_ \"':{}#", k=3)) for _ in range(random.randrange(4)))
    return {key: drawn(random, depth=depth + 1) for key in keys}


@pytest.mark.parametrize("seed", range(10))
def test_json_is_hjson(seed):
    """Every JSON text has the same value under both readers, on one line and on many."""
    random = Random(seed)
    for indent in (None, 0, 2) * 20:
        value = {"a": drawn(random)}
        text = json.dumps(value, indent=indent, ensure_ascii=random.random() < 0.5)
        assert parse_hjson(text) == value
