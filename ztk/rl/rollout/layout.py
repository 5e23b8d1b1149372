"""The layout of texts in a forward: packed one after another without padding, or in a row each with padding at the end.

[Note: The bits of packed texts] A pack's shape depends on its texts, so a rollout's forwards and the trainer's have different shapes.
They are bitwise equal if no result of a text depends on its neighbours. On a CPU in fp32 this holds for the native decoder: rows of
oneDNN's products do not depend on the number of rows from 2 on (`_products_agree` tests the shapes of the model), norms and rotary
embedding are computed per row, and `EngineAttention` sums over keys in blocks from position 0 on, wherever they are stored. Texts can
thus share a common beginning, and a prompt with eight answers is computed once. The last elements of an activation, beyond full vectors,
take another path in torch's code, also at the end of each thread's part. Packs are therefore padded with unused tokens until there are no
such elements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.kernels import is_cut_evenly
from ztk.nn import Decoder, Documents
from ztk.nn.linear import Linear, linear
from ztk.nn.loss import IGNORED
from ztk.nn.moe import SparseMLP
from ztk.nn.self_attention import CausalAttention
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.rollout.engine_attention import EngineAttention, has_engine_attention, use_engine_attention

_ROWS = (2, 3, 5, 8, 17, 33, 64, 130)
_PAD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The tokens of one forward. tokens: int64 [B, T] on the engine's device.

    documents: documents of packed texts, or None if each text has a row.
    starts: first index of each text in the flattened tokens, int64 [S] on the CPU. borders, prompts: int64 [S] on the CPU, the number of
    first tokens that a text shares with others, and their index; starts is then the index that the text would have if they preceded its
    own tokens. None if no text shares any.
    """

    tokens: Tensor
    documents: Documents | None
    starts: Tensor
    borders: Tensor | None = None
    prompts: Tensor | None = None

    def forward(self, engine: Any) -> Tensor:
        """Returns the output of `engine`, or of a decoder: [B, T, ...]."""
        return engine(self.tokens) if self.documents is None else engine(self.tokens, documents=self.documents)

    def micro_batch(self, loss_of: Callable[[Any], Tensor], *, token_weight: float | None = None) -> MicroBatch:
        """Returns the arguments of a forward, for `MicroBatch`. loss_of calls `forward` of the model that it gets."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return MicroBatch(args=(self.tokens,), kwargs=documents, loss_of=loss_of, token_weight=token_weight)

    def at(self, positions: Tensor) -> Tensor:
        """Returns the indices of one token per text in the flattened tokens, positions int64 [S] on the CPU: int64 [S] on the device."""
        return self._place(torch.arange(len(positions)), positions).to(self.tokens.device)

    def places(self, mask: Tensor) -> Tensor:
        """Returns the indices of the tokens of `mask`, bool [S, length] on the CPU, text by text, in the flattened tokens: int64 [N] on
        the device.
        """
        text, position = mask.nonzero().unbind(1)
        return self._place(text, position).to(self.tokens.device)

    def before(self, mask: Tensor) -> Tensor:
        """Same as `places`, for the token before each token of `mask`, which predicts it. None of them may be a text's first."""
        text, position = mask.nonzero().unbind(1)
        return self._place(text, position - 1).to(self.tokens.device)

    def targets(self, mask: Tensor) -> Tensor:
        """Returns the next token of each token if that is in `mask`, bool [S, length] on the CPU, else -100: int64 [B, T] on the device.

        Only for texts without shared tokens, whose next tokens differ.
        """
        assert self.borders is None, "every text has its own tokens"
        targets, flat = torch.full_like(self.tokens, IGNORED), self.tokens.flatten()
        targets.view(-1).index_copy_(0, self.before(mask), flat.index_select(0, self.places(mask)))
        return targets

    def text(self, row: int, *, count: int) -> Tensor:
        """Returns the indices of the first `count` tokens of a text: int64 [count] on the CPU."""
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
    """Lays out texts. tokens: int64 [S, T], whose first `lengths`, int64 [S], are texts; on the CPU. packs: without padding, short texts
    first.

    module: a model whose results must be bitwise independent of the pack, if required. Only native decoders can be.
    prompt_lengths: int64 [S]. With them, and a module that supports it, common prompts of a pack are computed once.
    """
    S, T = tokens.shape
    if not packs:
        return Layout(tokens=tokens.to(device), documents=None, starts=torch.arange(S) * T)
    if module is not None and prompt_lengths is not None and has_engine_attention(module):
        prompts = [tuple(row[:count].tolist()) for row, count in zip(tokens, prompt_lengths.tolist(), strict=True)]
        if len(set(prompts)) < S:
            return _shared(tokens, lengths=lengths, prompts=prompts, device=device, module=module)
    order = lengths.argsort(stable=True)
    is_token = torch.arange(T) < lengths[order].unsqueeze(1)
    flat, positions = tokens[order][is_token], torch.arange(T).expand(S, T)[is_token]
    if module is not None and (extra := _missing(len(flat), module=module)):
        flat = torch.cat([flat, flat.new_full((extra,), _PAD)])
        positions = torch.cat([positions, torch.zeros(extra, dtype=torch.int64)])  # each is a separate text
    starts = torch.empty_like(lengths)
    starts[order] = lengths[order].cumsum(0) - lengths[order]
    documents = Documents.at(positions.unsqueeze(0)).to(device)
    return Layout(tokens=flat.unsqueeze(0).to(device), documents=documents, starts=starts)


def _shared(
    tokens: Tensor, *, lengths: Tensor, prompts: list[tuple[int, ...]], device: torch.device, module: nn.Module
) -> Layout:
    """Lays out every different prompt once, then the answers, short ones first. prompts: the prompt of each text."""
    order = lengths.argsort(stable=True).tolist()
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    which, borders = [numbers[prompt] for prompt in prompts], [len(prompt) for prompt in prompts]
    ends = lengths.tolist()
    answering = [row for row in order if ends[row] > borders[row]]  # an empty answer is not a document
    # Per document: tokens, its first position, and the document that it continues. Padding comes last, each token as a document.
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


def can_pack(module: nn.Module) -> bool:
    """Returns whether the module supports packed texts: the native decoder, and models of transformers of tested families."""
    return isinstance(module, Decoder) or bool(getattr(module, "takes_documents", False))


def pack_exactly(*modules: nn.Module, device: torch.device) -> bool:
    """Makes the results of each decoder bitwise independent of the pack, if all of them support this on this processor.

    Returns whether they do.
    """
    if not all(_is_plain(module, device=device) and _products_agree(module) for module in modules):
        return False
    for module in modules:
        use_engine_attention(module)
    return True


def _is_plain(module: nn.Module, *, device: torch.device) -> bool:
    """Returns whether the module is an unmodified native decoder in fp32 on a CPU, without experts and adapters."""
    if not isinstance(module, Decoder) or device.type != "cpu":
        return False
    parts = list(module.modules())
    if any(isinstance(part, SparseMLP) or hasattr(part, "lora_A") for part in parts):
        return False
    attends = (type(part) for part in parts if isinstance(part, CausalAttention))
    return all(kind in (CausalAttention, EngineAttention) for kind in attends) and all(
        parameter.dtype == torch.float32 for parameter in module.parameters()
    )


@torch.no_grad()
def _products_agree(module: nn.Module) -> bool:
    """Returns whether rows of products with weights of these shapes are bitwise independent of the number of rows, on this processor."""
    generator = torch.Generator().manual_seed(0)
    for of, out in {(part.in_features, part.out_features) for part in module.modules() if isinstance(part, Linear)}:
        x, weight = (torch.randn(count, of, generator=generator) for count in (max(_ROWS), out))
        full = linear(x, weight=weight)
        if not all(torch.equal(linear(x[:count], weight=weight), full[:count]) for count in _ROWS):
            return False
    return True


def _missing(count: int, *, module: nn.Module) -> int:
    """Returns the number of padding tokens for a pack of `count`: every thread's part of an activation is full vectors, and no product
    has a single row. 0 for models of transformers, whose results depend on the pack in any case.
    """
    if not isinstance(module, Decoder):
        return 0
    width, filled = module.config.hidden_dim, max(2, count)
    while not is_cut_evenly(filled * width):
        filled += 1
    return filled - count
