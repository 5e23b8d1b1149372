"""Text from a model."""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.data import ByteTokenizer
from ztk.runtime.seed import generator


@torch.no_grad()
def sample_text(
    model: Callable[[Tensor], Tensor],
    *,
    prompt: str,
    num_bytes: int,
    max_seq_len: int,
    device: torch.device | str = "cpu",
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """`prompt` and `num_bytes` bytes that a byte-level `model` (tokens [1, T] -> logits [1, T, V]) appends to it.

    Plain sampling from softmax(logits / temperature); temperature 0 takes the likeliest byte. One forward per byte over
    the last `max_seq_len` of them. Collective where the model is: called with the same arguments on all ranks it runs
    the same forwards and returns the same text on all, because the draws come from `seed` on CPU.

    Raises:
        ValueError: for a negative temperature.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0")
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(prompt or "\n")
    draws = torch.rand(num_bytes, generator=generator(seed, "sample"), dtype=torch.float64).tolist()
    for draw in draws:
        logits = (
            model(tokens[-max_seq_len:].unsqueeze(0).to(device))[0, -1, : tokenizer.vocab_size].double().cpu()
        )  # bytes only
        tokens = torch.cat([tokens, _choose(logits, draw=draw, temperature=temperature)])
    return tokenizer.decode(tokens)


def _choose(logits: Tensor, *, draw: float, temperature: float) -> Tensor:
    """The token at which the cumulative probability passes `draw`, int64 [1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cumulative, draw * cumulative[-1:]).clamp(max=len(logits) - 1)
