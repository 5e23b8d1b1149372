"""Faults of optimizer policies, and which parameter gets which hyperparameters."""

import pytest
import torch

from ztk import kernels
from ztk.optim import OptimizerPolicy, ParameterGroup, group_parameters

SHAPES = {
    "embedding.weight": (256, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.up.weight": (32, 8),
    "head.bias": (256,),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamax"}, "optimizer.name=adamax: must be one of adamw, adam, sgd, lion, lamb, muon"),
        ({"lr": -1.0}, "optimizer.lr=-1.0"),
        ({"lr": float("nan")}, "optimizer.lr=nan"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas=.*number 2 must be 0 or more and below 1"),
        ({"betas": (0.9,)}, "optimizer.betas=.*two numbers"),
        ({"eps": 0.0}, "optimizer.eps=0.0"),
        ({"clip_grad_norm": -1.0}, "optimizer.clip_grad_norm=-1.0"),
        ({"momentum": 0.9}, "optimizer.momentum=0.9 has no effect here, only with optimizer=sgd or muon: leave it out"),
        ({"nesterov": True}, "optimizer.nesterov=true has no effect here, only with optimizer=sgd or muon"),
        ({"name": "sgd", "nesterov": True}, "without momentum: use optimizer.momentum=0.9"),
        ({"name": "sgd", "momentum": 1.0}, "optimizer.momentum=1.0"),
        (
            {"name": "sgd", "betas": (0.9, 0.9)},
            "optimizer.betas=\\[0.9,0.9\\] has no effect here, only with optimizer=adamw, adam, lion",
        ),
        ({"name": "muon", "ns_steps": 100}, "optimizer.ns_steps=100: must be 1 or more and at most 99"),
        ({"name": "muon", "adjust_lr": "rms"}, "optimizer.adjust_lr=rms: must be one of original, match_rms_adamw"),
        ({"name": "muon", "adam_names": "("}, "optimizer.adam_names='.': not a regular expression"),
        ({"name": "muon", "momentum": 0.0}, "optimizer.nesterov=true has no effect without momentum"),
        ({"adam_lr": 0.1}, "optimizer.adam_lr=0.1 has no effect here, only with optimizer=muon"),
        ({"name": "lion", "eps": 1e-8}, "optimizer.eps=1e-08 has no effect here, only with optimizer=adamw"),
        ({"groups": (ParameterGroup(pattern="head", lr=-1.0),)}, r"optimizer.groups\['head'\].lr=-1.0"),
        (
            {"groups": (ParameterGroup(pattern="a", momentum=0.5),)},
            r"optimizer.groups\['a'\].momentum=0.5 has no effect here, only with optimizer=sgd or muon",
        ),
        ({"name": "sgd", "groups": (ParameterGroup(pattern="a", momentum=0.5),)}, "needs a momentum buffer"),
    ],
)
def test_faults_name_key_value_and_fix(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerPolicy(**options)


def test_pattern_must_be_a_regular_expression():
    with pytest.raises(ValueError, match="not a regular expression"):
        ParameterGroup(pattern="(")


def test_matrices_decay_and_vectors_do_not():
    table = group_parameters(OptimizerPolicy(weight_decay=0.1), shapes=SHAPES)
    assert [row.weight_decay for row in table.rows] == [0.1, 0.0]
    assert table.row_of == {"embedding.weight": 0, "blocks.0.norm.weight": 1, "blocks.0.up.weight": 0, "head.bias": 1}


@pytest.mark.parametrize("options", [{"weight_decay": 0.1, "decay_all": True}, {"weight_decay": 0.0}])
def test_one_row_where_all_are_alike(options):
    table = group_parameters(OptimizerPolicy(**options), shapes=SHAPES)
    assert len(table.rows) == 1 and set(table.row_of.values()) == {0}


def test_first_matching_group_wins_and_inherits():
    groups = (
        ParameterGroup(pattern=r"^head\.", lr=1e-2, weight_decay=0.3),
        ParameterGroup(pattern="bias|norm", lr=1.0),
    )
    table = group_parameters(OptimizerPolicy(lr=1e-3, weight_decay=0.1, groups=groups), shapes=SHAPES)
    by_name = {name: table.rows[row] for name, row in table.row_of.items()}
    assert (by_name["head.bias"].lr, by_name["head.bias"].weight_decay) == (1e-2, 0.3)  # asked for, so a vector decays
    assert (by_name["blocks.0.norm.weight"].lr, by_name["blocks.0.norm.weight"].weight_decay) == (1.0, 0.0)
    assert (by_name["blocks.0.up.weight"].lr, by_name["blocks.0.up.weight"].beta2) == (1e-3, 0.95)


def test_a_group_without_parameters_is_a_fault():
    policy = OptimizerPolicy(groups=(ParameterGroup(pattern="lm_head"),))
    with pytest.raises(ValueError, match="'lm_head'.*matches no parameter.*embedding.weight"):
        group_parameters(policy, shapes=SHAPES)


def test_hyper_layout():
    policy = OptimizerPolicy(lr=0.5, betas=(0.25, 0.75), eps=0.125, weight_decay=2.0)
    hyper = group_parameters(policy, shapes=SHAPES).hyper()
    assert hyper.dtype == torch.float32 and hyper.shape == (2, kernels.HYPER_COLUMNS)
    assert hyper.tolist() == [[0.5, 0.25, 0.75, 0.125, 2.0, 0, 0, 0], [0.5, 0.25, 0.75, 0.125, 0.0, 0, 0, 0]]
    sgd = group_parameters(OptimizerPolicy(name="sgd", lr=0.5, momentum=0.75), shapes=SHAPES).hyper()
    assert sgd.tolist() == [[0.5, 0, 0, 0, 0, 0.75, 0, 0]]


def test_muon_takes_the_matrices_of_the_body():
    """Embeddings by their module or name, heads by name and vectors are AdamW's, at its own rate."""
    shapes = {**SHAPES, "tokens.weight": (256, 8), "head.weight": (256, 8), "blocks.0.conv": (4, 4, 4)}
    policy = OptimizerPolicy(name="muon", lr=0.02, adam_lr=0.003, adjust_lr="original")
    assert (policy.momentum, policy.nesterov, policy.ns_steps, policy.ns_dtype) == (0.95, True, 5, "bf16")
    table = group_parameters(policy, shapes=shapes, tables=("tokens.weight",))
    rows = {name: table.rows[row] for name, row in table.row_of.items()}
    assert [name for name, row in rows.items() if row.muon_scale] == ["blocks.0.up.weight"]
    assert rows["blocks.0.up.weight"].muon_scale == 2.0  # sqrt(32 / 8)
    assert rows["blocks.0.up.weight"].lr == 0.02
    assert {row.lr for row in rows.values() if not row.muon_scale} == {0.003}
    everything = OptimizerPolicy(name="muon", adam_names="^$", adjust_lr="match_rms_adamw")
    table = group_parameters(everything, shapes=SHAPES)
    assert table.rows[table.row_of["embedding.weight"]].muon_scale == 0.2 * 16
