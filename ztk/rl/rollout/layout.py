"""Texts as a forward computes them: packed one after another without padding, or a row each with padding behind.

[Note: The bits of packed texts]
A pack's shape follows from its texts, so a rollout's forwards and the trainer's have different shapes. Bits agree where nothing that is
computed for a text depends on what is beside it. On a CPU in fp32 that holds for the native decoder: rows of oneDNN's products have the same
bits in any number from 2 on (`_products_agree` tries it for the shapes of the model), norms and rotary embedding are computed per row, and
`CachedAttention` sums over keys in blocks from position 0 on, wherever they lie: so texts share what they begin with, and a prompt of eight
answers is computed once. An activation's last elements, beyond full vectors, take another path of torch's code, and so do those at the end of
each thread's part: packs are filled up with tokens that nobody reads until there are none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.inference.steps import Span
from ztk.kernels import is_cut_evenly
from ztk.nn import Decoder, Documents
from ztk.nn.attention import CausalAttention
from ztk.nn.linear import Linear, linear
from ztk.nn.loss import IGNORED
from ztk.nn.moe import SparseMLP
from ztk.rl.rollout.attention import CachedAttention, use_cached_attention

_ROWS = (2, 3, 5, 8, 17, 33, 64, 130)
_PAD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The tokens of one forward. tokens: int64 [B, T] on the engine's device. documents: of packed texts; None: each has a row.

    starts: where each text begins in the flattened tokens, int64 [S] on the CPU. borders, prompts: int64 [S] on the CPU, how many first tokens
    of each text lie elsewhere, where texts share them, and where; starts is then where the text would begin if they were in front of its own
    tokens. None: no text shares any.
    """

    tokens: Tensor
    documents: Documents | None
    starts: Tensor
    borders: Tensor | None = None
    prompts: Tensor | None = None

    def forward(self, engine: Any) -> Tensor:
        """What `engine`, or a decoder, computes: [B, T, ...]."""
        return engine(self.tokens) if self.documents is None else engine(self.tokens, documents=self.documents)

    def at(self, positions: Tensor) -> Tensor:
        """Of one token per text, positions int64 [S] on the CPU, the places in the flattened tokens: int64 [S] on the device."""
        return self._place(torch.arange(len(positions)), positions).to(self.tokens.device)

    def places(self, mask: Tensor) -> Tensor:
        """Of the tokens of `mask`, bool [S, length] on the CPU, text after text, the places in the flattened tokens: int64 [N] on the
        device."""
        text, position = mask.nonzero().unbind(1)
        return self._place(text, position).to(self.tokens.device)

    def before(self, mask: Tensor) -> Tensor:
        """As `places`, of the token before each token of `mask`, from which it is predicted; none of them is a text's first."""
        text, position = mask.nonzero().unbind(1)
        return self._place(text, position - 1).to(self.tokens.device)

    def targets(self, mask: Tensor) -> Tensor:
        """What follows each of the tokens where it is one of `mask`, bool [S, length] on the CPU, else -100: int64 [B, T] on the device. For
        texts that share no tokens: what follows a shared one differs."""
        assert self.borders is None, "every text has its own tokens"
        targets, flat = torch.full_like(self.tokens, IGNORED), self.tokens.flatten()
        targets.view(-1).index_copy_(0, self.before(mask), flat.index_select(0, self.places(mask)))
        return targets

    def text(self, row: int, *, count: int) -> Tensor:
        """The places of the first `count` tokens of a text: int64 [count] on the CPU."""
        return self._place(torch.tensor(row), torch.arange(count))

    def _place(self, text: Tensor, position: Tensor) -> Tensor:
        own = self.starts[text] + position
        if self.borders is None or self.prompts is None:
            return own
        return torch.where(position < self.borders[text], self.prompts[text] + position, own)


def lay_out(
    tokens: Tensor,
    *,
    lengths: Tensor,
    packs: bool,
    device: torch.device,
    module: nn.Module | None = None,
    prompt_lengths: Tensor | None = None,
) -> Layout:
    """tokens: int64 [S, T], of which the first `lengths`, int64 [S], are texts; on the CPU. packs: without padding, short texts first.

    module: a decoder whose bits a pack must keep; None: any will do. prompt_lengths: of the texts, int64 [S]: in a pack for a module that can,
    prompts that several texts begin with are there once; None: every text is there in full.
    """
    S, T = tokens.shape
    if not packs:
        return Layout(tokens=tokens.to(device), documents=None, starts=torch.arange(S) * T)
    if module is not None and prompt_lengths is not None and has_cache(module):
        prompts = [tuple(row[:count].tolist()) for row, count in zip(tokens, prompt_lengths.tolist(), strict=True)]
        if len(set(prompts)) < S:
            return _shared(tokens, lengths=lengths, prompts=prompts, device=device, module=module)
    order = lengths.argsort(stable=True)
    is_token = torch.arange(T) < lengths[order].unsqueeze(1)
    flat, positions = tokens[order][is_token], torch.arange(T).expand(S, T)[is_token]
    if module is not None and (extra := _missing(len(flat), module=module)):
        flat = torch.cat([flat, flat.new_full((extra,), _PAD)])
        positions = torch.cat([positions, torch.zeros(extra, dtype=torch.int64)])  # each a text of its own
    starts = torch.empty_like(lengths)
    starts[order] = lengths[order].cumsum(0) - lengths[order]
    documents = Documents.at(positions.unsqueeze(0)).to(device)
    return Layout(tokens=flat.unsqueeze(0).to(device), documents=documents, starts=starts)


def _shared(
    tokens: Tensor, *, lengths: Tensor, prompts: list[tuple[int, ...]], device: torch.device, module: nn.Module
) -> Layout:
    """First every prompt once, then each text's other tokens, short ones first. prompts: of each text."""
    order = lengths.argsort(stable=True).tolist()
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    which, borders = [numbers[prompt] for prompt in prompts], [len(prompt) for prompt in prompts]
    ends = lengths.tolist()
    answering = [row for row in order if ends[row] > borders[row]]  # an empty answer is no document
    # Per document: tokens, its first position, what it goes on with. Last what fills the pack up, each token a document.
    parts = [(torch.tensor(prompt), 0, -1) for prompt in numbers]
    parts += [(tokens[row, borders[row] : ends[row]], borders[row], which[row]) for row in answering]
    extra = _missing(sum(len(part) for part, _, _ in parts), module=module)
    parts += [(tokens.new_full((1,), _PAD), 0, -1)] * extra
    counts = torch.tensor([len(part) for part, _, _ in parts])
    cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    positions = torch.cat([torch.arange(first, first + len(part)) for part, first, _ in parts])
    documents = Documents(
        positions=positions.unsqueeze(0),
        cu_seqlens=cu_seqlens.to(torch.int32),
        longest=int(positions.max()) + 1,
        starts=(tuple(cu_seqlens[:-1].tolist()),),
        continued=tuple(continued for _, _, continued in parts),
    ).to(device)
    starts = torch.zeros_like(lengths)
    starts[answering] = cu_seqlens[len(numbers) :][: len(answering)] - torch.tensor(borders)[answering]
    return Layout(
        tokens=torch.cat([part for part, _, _ in parts]).unsqueeze(0).to(device),
        documents=documents,
        starts=starts,
        borders=torch.tensor(borders),
        prompts=cu_seqlens[torch.tensor(which)],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What texts have got since the last forward, one text after the other: tokens, positions int64 [N]; starts: where each text's begin,
    int64 [R]. spans: where they are; slots are texts."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    spans: list[Span]


def new_tokens(tokens: Tensor, *, rows: Tensor, since: Tensor, until: Tensor) -> NewTokens:
    """Of texts `rows`, int64 [R], the tokens from `since` to `until`, int64 [R] each, of tokens int64 [S, T] on the CPU."""
    counts = until - since
    starts = counts.cumsum(0) - counts
    columns = (rows.tolist(), since.tolist(), counts.tolist(), starts.tolist())
    spans = [
        Span(slot=slot, start=start, length=length, row=row) for slot, start, length, row in zip(*columns, strict=True)
    ]
    if len(rows) == int(counts.sum()):  # one of each, as in most forwards
        return NewTokens(tokens=tokens[rows, since], positions=since, starts=starts, spans=spans)
    at = torch.arange(tokens.shape[1])
    is_new = (at >= since.unsqueeze(1)) & (at < until.unsqueeze(1))
    return NewTokens(tokens=tokens[rows][is_new], positions=at.expand(is_new.shape)[is_new], starts=starts, spans=spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A forward over what texts have got since the last one. spans: where each text's new tokens are, the filling's last."""

    layout: Layout
    spans: list[Span]


def lay_out_new(new: NewTokens, *, filling: int, module: nn.Module, device: torch.device) -> Continued:
    """filling: the slot of tokens that fill the forward up. The layout's `at` takes positions less those of each text's first token here."""
    flat, positions, spans = new.tokens, new.positions, new.spans
    if extra := _missing(len(flat), module=module):
        fills = [Span(slot=filling, start=0, length=1, row=len(flat) + number) for number in range(extra)]
        spans = [*spans, *fills]
        flat = torch.cat([flat, flat.new_full((extra,), _PAD)])
        positions = torch.cat(
            [positions, torch.zeros(extra, dtype=torch.int64)]
        )  # all alike, at one place of the cache
    documents = Documents(  # attention goes by the spans, so positions are all that counts
        positions=positions.unsqueeze(0),
        cu_seqlens=torch.tensor([0, len(flat)], dtype=torch.int32),
        longest=int(positions.max()) + 1,
        starts=((0,),),
    )
    layout = Layout(tokens=flat.unsqueeze(0).to(device), documents=documents.to(device), starts=new.starts)
    return Continued(layout=layout, spans=spans)


def can_pack(module: nn.Module) -> bool:
    """Whether the module takes packed texts: the native decoder does."""
    return isinstance(module, Decoder)


def pack_exactly(*modules: nn.Module, device: torch.device) -> bool:
    """Makes each a decoder whose bits do not depend on what a text is packed with, if all of them can be on this processor, and says
    whether."""
    if not all(_is_plain(module, device=device) and _products_agree(module) for module in modules):
        return False
    for module in modules:
        use_cached_attention(module)
    return True


def has_cache(module: nn.Module) -> bool:
    """All its attention takes a `TextCache`."""
    attends = [part for part in module.modules() if isinstance(part, CausalAttention)]
    return bool(attends) and all(isinstance(part, CachedAttention) for part in attends)


def _is_plain(module: nn.Module, *, device: torch.device) -> bool:
    """A native decoder in fp32 on a CPU, without experts and adapters, that attends as it was made to."""
    if not isinstance(module, Decoder) or device.type != "cpu":
        return False
    parts = list(module.modules())
    if any(isinstance(part, SparseMLP) or hasattr(part, "lora_A") for part in parts):
        return False
    attends = (type(part) for part in parts if isinstance(part, CausalAttention))
    return all(kind in (CausalAttention, CachedAttention) for kind in attends) and all(
        parameter.dtype == torch.float32 for parameter in module.parameters()
    )


@torch.no_grad()
def _products_agree(module: nn.Module) -> bool:
    """Rows of the products with weights of these shapes have the same bits in any number of rows, on this processor."""
    generator = torch.Generator().manual_seed(0)
    for of, out in {(part.in_features, part.out_features) for part in module.modules() if isinstance(part, Linear)}:
        x, weight = (torch.randn(count, of, generator=generator) for count in (max(_ROWS), out))
        full = linear(x, weight=weight)
        if not all(torch.equal(linear(x[:count], weight=weight), full[:count]) for count in _ROWS):
            return False
    return True


def _missing(count: int, *, module: nn.Module) -> int:
    """Tokens that fill a pack of `count` up: every thread's part of an activation is full vectors, and no product has a lone row."""
    assert isinstance(module, Decoder)
    width, filled = module.config.hidden_dim, max(2, count)
    while not is_cut_evenly(filled * width):
        filled += 1
    return filled - count
