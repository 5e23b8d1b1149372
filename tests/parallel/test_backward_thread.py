"""Backwards on another thread and on tensors that report a GPU: recomputation, experts, and a model of transformers."""

import hashlib
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.device_tagged import DEVICE, Streams, backward_elsewhere, gpu_tensors, move, products_of_torch
from tests.hf.small import llama_config
from tests.parallel.moe.runs import CONFIG, VOCABULARY
from ztk.core.policies.recompute import RecomputePolicy
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.precision import PrecisionPolicy
from ztk.core.runtime import Process
from ztk.core.runtime.streams import use_api
from ztk.nn import Decoder
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.recompute.apply import recompute_blocks
from ztk.zero.offload import OffloadPolicy

MODELS = ("experts", "transformers")
RECOMPUTE = {
    "none": RecomputePolicy(),
    "full": RecomputePolicy(mode="full"),
    "selective": RecomputePolicy(mode="selective"),
    "inputs on the host": RecomputePolicy(mode="full", inputs_on_cpu=True),
}
TRAINED = (("experts", "none"), ("experts", "selective"), ("transformers", "inputs on the host"))


class Llama(nn.Module):
    """transformers' model with the call of a Decoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(llama_config(use_cache=False, tie_word_embeddings=False))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=targets).loss


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(CONFIG) if name == "experts" else Llama()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def digests(process: Process, *, elsewhere: bool) -> dict[tuple[str, str], str]:
    """Bits of the weights after three steps at stage 3, by model and recomputation."""
    found = {}
    for name, mode in TRAINED:
        engine = parallelize(
            built(name),
            process=process,
            optimizer=OptimizerPolicy(lr=1e-2, clip_grad_norm=0.5),
            precision=PrecisionPolicy.named("bf16"),
            zero=ZeroPolicy(stage=3, bucket_size=3000),
            offload=OffloadPolicy(optimizer="cpu", parameters="cpu") if mode == "selective" else None,
            recompute=RECOMPUTE[mode],
        )
        with backward_elsewhere() if elsewhere else nullcontext():
            for step in range(2):
                engine.backward(engine(*batch(2 * step + process.rank)))
                engine.step()
        bits = hashlib.sha256()
        for _, value in sorted((key, value.clone()) for key, value in engine.zero.full_parameters()):
            bits.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        found[name, mode] = bits.hexdigest()
        engine.close()
    return found


def test_another_thread_changes_no_bit(ranks):
    pytest.importorskip("transformers")
    here = ranks(2).run(digests, elsewhere=False)[0]
    assert ranks(2).run(digests, elsewhere=True)[0] == here
    assert here["experts", "none"] == here["experts", "selective"]  # and neither does recomputation


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_has_the_gradients_of_a_cpu(name):
    """No operation of forward, recomputation or backward mixes devices."""
    pytest.importorskip("transformers")
    tokens, targets = batch(0)
    for mode, recompute in RECOMPUTE.items():
        found = []
        for device in ("cpu", str(DEVICE)):
            with products_of_torch(), gpu_tensors(), backward_elsewhere(), use_api(Streams()):
                model = built(name)
                if device != "cpu":
                    move(model, device=device)
                recompute_blocks(model, policy=recompute)
                model(tokens.to(device), targets.to(device)).backward()
                gradients = [parameter.grad for parameter in model.parameters()]
                assert all(gradient.is_cuda == (device != "cpu") for gradient in gradients), mode
                found.append([gradient.cpu() for gradient in gradients])
        assert all(torch.equal(here, there) for here, there in zip(*found, strict=True)), mode
