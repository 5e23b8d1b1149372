"""A small decoder trained here for some seconds, on the Python standard library's text."""

import json

import torch

from ztk.nn import Decoder, DecoderConfig

_TRAINED, _HELD_OUT = json.__file__, json.decoder.__file__


def _bytes(path: str) -> torch.Tensor:
    with open(path, "rb") as file:
        return torch.tensor(list(file.read()))


def trained_decoder(*, steps: int = 120) -> Decoder:
    """0.2 million parameters, fp32."""
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, hidden_dim=176, max_seq_len=256)
    )
    text = _bytes(_TRAINED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - 97, (16,), generator=chance)
        rows = text[starts.unsqueeze(1) + torch.arange(97)]
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def held_out() -> list[int]:
    """2,048 bytes of another file."""
    return _bytes(_HELD_OUT)[:2048].tolist()
