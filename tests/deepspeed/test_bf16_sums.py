"""bf16 gradients of several micro-batches add up in fp32; DDP's add up in bf16, and differ by bf16's rounding."""

import pytest
import torch
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts

ACCUMULATION = 4


def accumulated(process, *, stage: int, style: str) -> dict[str, tuple[float, float]]:
    """The largest errors of a step's gradients, relative to the sum of the magnitudes that add up: the engine's, and DDP's.

    Each is compared with the sum in fp64 of the same bf16 gradients, which a plain bf16 model computes.
    """
    config = scripts.config(
        stage=stage, accumulation=ACCUMULATION, bf16={"enabled": True}, train_batch_size=None, gradient_clipping=0.0,
        train_micro_batch_size_per_gpu=2,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    plain = scripts.build().bfloat16()
    exact, sizes, ddp = {}, {}, {}
    for number in range(ACCUMULATION):
        draw = torch.Generator().manual_seed(100 * number + process.rank)
        x, y = torch.randn(2, 28, generator=draw).bfloat16(), torch.randint(10, (2,), generator=draw)
        top = torch.randn(2, 10, generator=draw).bfloat16()
        if style == "non-scalar":
            plain(x).backward(top / ACCUMULATION)  # a power of two: exact
            engine(x).backward(top)
        else:
            (F.cross_entropy(plain(x), y) / ACCUMULATION).backward()
            loss = F.cross_entropy(engine(x), y)
            loss.backward() if style == "loss.backward" else engine.backward(loss)
        for name, parameter in plain.named_parameters():
            parts = [part / process.world_size for part in process.comm.gather_objects(parameter.grad)]
            exact[name] = exact.get(name, 0.0) + sum(part.double() for part in parts)
            sizes[name] = sizes.get(name, 0.0) + sum(part.double().abs() for part in parts)
            ddp[name] = ddp.get(name, 0.0) + sum(parts[1:], parts[0])
            parameter.grad = None
        if number + 1 < ACCUMULATION:
            engine.step()
    errors = {}
    for name, parameter in engine.module.named_parameters():
        found = deepspeed.utils.safe_get_full_grad(parameter).double()
        is_used = sizes[name] > 0
        assert found[~is_used].eq(0).all()
        own, other = (
            (value.double() - exact[name]).abs()[is_used] / sizes[name][is_used] for value in (found, ddp[name])
        )
        errors[name] = float(own.max()), float(other.max())
    engine.step()
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_micro_batches_add_up_in_fp32(ranks, stage):
    """A sum of n numbers with unit roundoff u errs by at most (n - 1) u / (1 - (n - 1) u) of the sum of their magnitudes (Higham, 4.2).

    fp32: n = 2 ranks x 4 micro-batches, u = 2^-24. DDP's bf16: an addition per micro-batch and three between them, u = 2^-8. torch's default
    tolerance for bf16 is relative to the sum itself, which cancellation makes smaller than the magnitudes: DeepSpeed's
    `test_zero_user_backward` compares with DDP by it.
    """
    for style in ("engine.backward", "loss.backward", "non-scalar"):
        for errors in ranks(2).run(accumulated, stage=stage, style=style):
            for name, (own, ddp) in errors.items():
                assert own <= 7 * 2**-24 / (1 - 7 * 2**-24), (name, style)
                assert ddp <= 4 * 2**-8 / (1 - 4 * 2**-8), (name, style)
            assert max(ddp for _, ddp in errors.values()) > 2**-9, (
                "DDP rounds like fp32, so the comparison shows nothing"
            )
