"""`deepspeed.ops.op_builder`: the checks of scripts before they use an op."""

import pytest
import torch

from ztk.deepspeed.names.tree import module_of

builders, ops = module_of("deepspeed.ops.op_builder"), module_of("deepspeed.ops")


@pytest.mark.parametrize("name", ["CPUAdamBuilder", "FusedAdamBuilder", "FusedLionBuilder", "AsyncIOBuilder"])
def test_an_op_that_ztk_has_is_ready(name):
    builder = getattr(builders, name)()
    assert builder.is_compatible() and ops.__compatible_ops__[builder.NAME] and builders.ALL_OPS[builder.name]
    with pytest.raises(
        AttributeError, match=f"{builder.NAME}.adam_update: a function of DeepSpeed's compiled extension"
    ):
        builder.load().adam_update  # noqa: B018


@pytest.mark.parametrize(
    "name", ["FusedLambBuilder", "TransformerBuilder", "EvoformerAttnBuilder", "CPUAdagradBuilder"]
)
def test_an_op_that_ztk_lacks_raises(name):
    builder = getattr(builders, name)()
    assert not builder.is_compatible() and not ops.__compatible_ops__[builder.NAME]
    with pytest.raises(RuntimeError, match=f"{name}.*does not have the op.*is_compatible"):
        builder.load()


def test_flattening_is_there():
    op = builders.UtilsBuilder().load()
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
    flat = op.flatten(tensors)
    assert flat.shape == (8,)
    assert all(torch.equal(a, b) for a, b in zip(op.unflatten(flat, tensors), tensors, strict=True))


def test_unknown_builders_are_refused():
    with pytest.raises(AttributeError, match="deepspeed.ops.op_builder.SparseAttnBuilder: not offered by ztk"):
        builders.SparseAttnBuilder  # noqa: B018
    assert module_of("deepspeed.ops.op_builder.all_ops").ALL_OPS is builders.ALL_OPS
    assert module_of("deepspeed.ops.aio").AsyncIOBuilder is builders.AsyncIOBuilder
    assert module_of("deepspeed.accelerator").is_current_accelerator_supported()
    assert not hasattr(ops, "__file__")
