"""Sampling of text from a model."""

from collections.abc import Callable

import torch
from torch import Tensor

from ztk.core.runtime.seed import generator
from ztk.data import ByteTokenizer


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
    tokenizer = ByteTokenizer()
    tokens = sample_tokens(
        model,
        prompt=tokenizer.encode(prompt or "\n"),
        num_tokens=num_bytes,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=max_seq_len,
        device=device,
        temperature=temperature,
        seed=seed,
    )
    return tokenizer.decode(tokens)


@torch.no_grad()
def sample_tokens(
    model: Callable[[Tensor], Tensor],
    *,
    prompt: Tensor,
    num_tokens: int,
    vocab_size: int,
    max_seq_len: int,
    device: torch.device | str = "cpu",
    temperature: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """Appends `num_tokens` sampled tokens below `vocab_size` to `prompt`, int64 [T], as `sample_text` does with bytes.

    Raises:
        ValueError: for a negative temperature.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0")
    tokens = prompt
    draws = torch.rand(num_tokens, generator=generator(seed, "sample"), dtype=torch.float64).tolist()
    for draw in draws:
        logits = model(tokens[-max_seq_len:].unsqueeze(0).to(device))[0, -1, :vocab_size].double().cpu()
        tokens = torch.cat([tokens, _choose(logits, draw=draw, temperature=temperature)])
    return tokens


def _choose(logits: Tensor, *, draw: float, temperature: float) -> Tensor:
    """The token at which the cumulative probability passes `draw`, int64 [1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cumulative, draw * cumulative[-1:]).clamp(max=len(logits) - 1)
