"""Initial values of any slice of any parameter, without computing the rest.

A parameter is cut into chunks of fixed size, and each chunk is drawn from a generator seeded by (seed, parameter name,
chunk number). So the cost of a rank's slice is proportional to the slice, and the full parameter is the same for
every way of cutting it.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ztk.core.runtime.seed import generator
from ztk.nn.decoder import Decoder
from ztk.nn.norm import RMSNorm

_CHUNK = 1 << 15
_CHUNKS_PER_THREAD = 16


def initial_values(model: Decoder, *, name: str, start: int, stop: int, seed: int) -> Tensor:
    """Elements [start, stop) of the flattened parameter `name` before training, float32 [stop - start] on CPU.

    Norm weights are one. Others are normal with a standard deviation of sqrt(2 / (5 dim)) (Nguyen and Salazar 2019,
    https://arxiv.org/abs/1910.05895), the two that write to the residual stream divided by sqrt(2 layers) so that its
    size does not grow with depth (GPT-2). The model may be on the meta device; a tied weight has the values of the
    embedding.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, RMSNorm):
        return torch.ones(stop - start, device="cpu")
    std = _standard_deviation(model, name=name)
    if owner is model.head and model.config.tie_embeddings:
        name = "embedding.weight"
    return _normal(start, stop=stop, parts=(seed, "initial", name)).mul_(std)


@torch.no_grad()
def initialise(
    model: Decoder, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Gives every parameter of `model`, on meta or not, its initial values on `device` in `dtype`; returns `model`."""
    for name, parameter in list(model.named_parameters()):
        values = initial_values(model, name=name, start=0, stop=parameter.numel(), seed=seed)
        owner, _, leaf = name.rpartition(".")
        values = values.view(parameter.shape).to(device=device, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=parameter.requires_grad))
    if model.config.tie_embeddings:
        model.head.weight = model.embedding.weight
    model.materialise_buffers(device)
    return model


def _standard_deviation(model: Decoder, *, name: str) -> float:
    std = math.sqrt(2 / (5 * model.config.dim))
    writes_to_residual = name.endswith(
        ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")
    )
    return std / math.sqrt(2 * model.config.layers) if writes_to_residual else std


def _normal(start: int, *, stop: int, parts: tuple[object, ...]) -> Tensor:
    """Elements [start, stop) of the endless sequence of standard normal numbers for the seed `parts`."""
    values = torch.empty(stop - start, device="cpu")

    def draw(chunk: int) -> None:
        # Always a full chunk: a shorter draw has other values.
        drawn = torch.randn(_CHUNK, generator=generator(*parts, chunk), device="cpu")
        first, last = max(start, chunk * _CHUNK), min(stop, (chunk + 1) * _CHUNK)
        values[first - start : last - start] = drawn[first - chunk * _CHUNK : last - chunk * _CHUNK]

    chunks = range(start // _CHUNK, -(-stop // _CHUNK))
    threads = min(torch.get_num_threads(), len(chunks) // _CHUNKS_PER_THREAD)
    if threads > 1:  # torch draws without the interpreter's lock
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, chunks))
    else:
        for chunk in chunks:
            draw(chunk)
    return values
