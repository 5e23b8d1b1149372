"""A loss from the head's weight where its logits would be large: as accurate, and the same bits at every stage."""

import hashlib
from unittest import mock

import pytest
import torch

from tests.zero.models import DTYPES
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime.seed import generator
from ztk.kernels import linear_cross_entropy
from ztk.nn import Decoder, DecoderConfig
from ztk.nn import loss as losses
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize

SHAPE = {"vocab_size": 211, "dim": 24, "layers": 1, "heads": 2, "kv_heads": 2, "hidden_dim": 32, "max_seq_len": 16}


def decoder(*, tied: bool) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**SHAPE, tie_embeddings=tied))


def everything_is_large():
    return mock.patch.multiple(losses, LARGE_LOGITS=0, bytes_kept=lambda *args, **options: 0)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_loss_of_full_logits(tied):
    """Products of 24 numbers in another order: each float32 sum is within 24 roundings of 2^-24, and so are the loss and its gradients,
    relative to the largest of them; 64 of them allow for the exponentials."""
    tokens = torch.randint(211, (2, 16))
    targets = tokens.roll(-1, dims=1)
    targets[0, :3] = -100
    model, found = decoder(tied=tied), []
    model.loss.z_loss = 1e-3
    for context in (mock.MagicMock(), everything_is_large()):
        with context, mock.patch.object(losses, "linear_cross_entropy", wraps=linear_cross_entropy) as op:
            model.zero_grad()
            loss = model(tokens, targets)
            loss.backward()
            found.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, op.call_count))
    (loss, gradients, calls), (own, own_gradients, own_calls) = found
    assert (calls, own_calls) == (0, 1)
    torch.testing.assert_close(own, loss, rtol=64 * 2**-24, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            own_gradients[name], gradient, rtol=0, atol=64 * 2**-24 * float(gradient.abs().max())
        )


def test_what_is_large():
    """Logits of 2 x 8192 tokens and 131072 columns in bfloat16 are 4 GiB; gradients in float32 and a chunk are less, with 4096 columns."""
    with torch.device("meta"):
        head = losses.Linear(4096, 131072)
        head.to(torch.bfloat16)
        is_large = losses.LanguageLoss._is_large
        x = torch.empty(2, 8192, 4096, dtype=torch.bfloat16)
        assert is_large(head, x=x)
        assert not is_large(head, x=x[:, :1024])  # 512 MiB
        assert not is_large(head, x=x[:, :4096])  # 2 GiB, and the weight's gradient alone is as much
        with torch.no_grad():
            assert is_large(head, x=x[:, :4096])
        head.weight.requires_grad_(False)
        assert not is_large(head, x=x)
        head.weight.requires_grad_(True)
    with (
        everything_is_large(),
        torch.autocast("cpu", torch.bfloat16),
    ):  # which casts the head's product, and not the op's
        assert not is_large(losses.Linear(8, 16), x=torch.empty(2, 4, 8))
    with torch.device("meta"):
        head.forward = lambda x: x
        assert not is_large(head, x=x)


def trained(process, *, stage: int, dtype: str, tied: bool) -> tuple[list[float], str]:
    """Losses of three steps and a hash of the weights."""
    found, bits = [], hashlib.sha256()
    with everything_is_large(), mock.patch.object(losses, "linear_cross_entropy", wraps=linear_cross_entropy) as op:
        engine = parallelize(
            decoder(tied=tied),
            process=process,
            optimizer=OptimizerPolicy(lr=1e-2, clip_grad_norm=0.5),
            precision=PrecisionPolicy(dtype=DTYPES[dtype]),
            zero=ZeroPolicy(stage=stage, bucket_size=2000),
        )
        for step in range(3):
            tokens = torch.randint(211, (2, 16), generator=generator("batch", step, process.rank))
            loss = engine(tokens, tokens.roll(-1, dims=1))
            engine.backward(loss)
            engine.step()
            found.append(float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    assert op.call_count == 3
    for _, value in engine.zero.full_parameters():
        bits.update(value.float().numpy().tobytes())
    return found, bits.hexdigest()


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_gives_the_same_bits(ranks, tied):
    first = ranks(2).run(trained, stage=0, dtype="bf16", tied=tied)[0]
    for stage in (1, 2, 3):
        assert ranks(2).run(trained, stage=stage, dtype="bf16", tied=tied)[0] == first, stage
