"""`UlyssesSPAttentionHF`: sequence parallelism for Hugging Face models, and the loader that divides sequences.

Each rank has consecutive tokens of every sequence. Around the model's own attention, heads are exchanged for tokens. Bekman et al. 2025,
https://arxiv.org/abs/2506.13996
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ztk.deepspeed.ulysses import state
from ztk.deepspeed.ulysses.layer import GroupExchange, gather_heads, scatter_heads
from ztk.parallel.sequence.ulysses import key_repeats

IGNORED = -100  # label that losses ignore


class UlyssesSPAttentionHF(nn.Module):
    """Wraps one of `transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS`. `register_with_transformers` creates and installs it.

    attn_head_count must be a multiple of the group's ranks; key heads are repeated if there are fewer. Other sizes (elements and rows),
    such as batch_size and attn_head_size, are read from the tensors. disable_in_eval: in eval mode every rank processes its own
    sequences.
    """

    def __init__(
        self,
        attn: Callable,
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: dist.ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        del batch_size, attn_head_size, num_hidden_layers, seq_length_is_variable, local_seq_length, global_seq_length
        self.attn, self.process_group, self.disable_in_eval = attn, process_group, disable_in_eval
        self._exchange = GroupExchange(process_group)
        self.world_size, self.sp_rank = self._exchange.size, self._exchange.rank
        key_repeats(heads=attn_head_count, key_heads=kv_head_count, ranks=self.world_size)
        self.core_attn_implementation: str | None = None
        self._seen: tuple[Tensor, Tensor] | None = None  # positions of this rank, and of the full sequence

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """query [B, H, T / n, D], key and value alike -> ([B, T / n, H, D], None).

        Raises ValueError without position_ids, which give the positions of this rank's tokens, and for a non-causal mask.
        """
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        _check_mask(attention_mask)
        kwargs["position_ids"] = self._full_positions(kwargs.get("position_ids"))
        parts = gather_heads(
            query.transpose(1, 2), key=key.transpose(1, 2), value=value.transpose(1, 2), exchange=self._exchange
        )
        query, key, value = (x.transpose(1, 2) for x in parts)
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None:
            # pyrefly: ignore[bad-argument-type]  # a number that Hugging Face's attention modules keep
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        try:
            out, weights = self.attn(module, query, key, value, None, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        del weights  # of some heads
        return scatter_heads(out, exchange=self._exchange), None

    def _full_positions(self, own: Tensor | None) -> Tensor:
        """Returns positions [B, T], gathered once for all layers of a forward."""
        if own is None:
            raise ValueError(
                "position_ids are missing: pass model(..., position_ids=) with this rank's positions in the full sequence, or wrap the "
                "loader in UlyssesSPDataLoaderAdapter and let its collator make them"
            )
        if self._seen is None or self._seen[0] is not own:
            parts = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(parts, own.contiguous(), group=self.process_group)
            full = torch.cat(parts, dim=1)
            if not (self.core_attn_implementation or "").startswith("flash") and bool((full.diff(dim=1) != 1).any()):
                raise ValueError(
                    f"position_ids that start anew within a sequence: {self.core_attn_implementation} would attend across documents; "
                    "use a flash attention implementation, or give each document its own row"
                )
            self._seen = own, full
        return self._seen[1]

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: object,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """Wraps the attention `core_attn_implementation` of all models in this process. Returns the mpu for `initialize`.

        model_name_or_path: a model, or the path of its configuration. sequence_parallel_size: ranks; returns None without any change for
        1.
        micro_batch_size: rows; accepted and read from the tensors.

        Raises ValueError for an unsuitable attention, and for a number of heads that the ranks do not divide.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and (seq_length or max_length) is None:
            raise ValueError("seq_length is missing: give it, or seq_length_is_variable=True")
        library: Any = importlib.import_module("transformers")
        functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        config = getattr(model_name_or_path, "config", None) or library.AutoConfig.from_pretrained(
            model_name_or_path, trust_remote_code=False
        )
        own = getattr(config, "_attn_implementation", None)
        known = [name for name in functions.valid_keys() if "eager" not in name]
        if core_attn_implementation not in known:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}: must be one of {', '.join(known)} (eager attention needs a mask "
                "over the full sequence)"
            )
        if hasattr(model_name_or_path, "config") and own not in (None, core_attn_implementation):
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}: the model has attn_implementation={own!r}; make them equal"
            )
        state.initialize_sequence_parallel(sequence_parallel_size)
        text, core = config.get_text_config(), functions[core_attn_implementation]
        core = getattr(core, "core", core)  # from an earlier registration
        ulysses = cls(
            attn=core,
            batch_size=micro_batch_size,
            attn_head_count=text.num_attention_heads,
            attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            kv_head_count=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            num_hidden_layers=text.num_hidden_layers,
            process_group=state.get_sequence_parallel_group(),
            seq_length_is_variable=True,
            disable_in_eval=disable_in_eval,
        )
        ulysses.core_attn_implementation = core_attn_implementation

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            return ulysses(module, *args, **kwargs)

        # pyrefly: ignore[missing-attribute]  # a second registration and a test find the original here
        attention.core = core
        functions[core_attn_implementation] = attention
        return state


class UlyssesSPDataLoaderAdapter:
    """Divides the batches of `dl` along the sequence: n ranks with a batch each become n rounds in which all ranks share one batch.

    Each batch is a dict with `input_ids`, `labels` and `position_ids` [B, T], and other values. Tensors are cut along dimension 1, on the
    CPU. `labels` become `shift_labels`, shifted before the cut. len() is n times the loader's.

    Raises ValueError for a batch without position_ids or labels, and for a length that n ranks do not divide.
    """

    def __init__(
        self, dl: DataLoader, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: object
    ) -> None:
        del device  # batches stay in main memory
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.iter, self.micro_batches = iter(dl), deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict]:
        return self

    def __next__(self) -> dict:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Prepares the next round. A collective call. Raises StopIteration at the end of an epoch, after which the next one begins."""
        try:
            batch = next(self.iter)
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        missing = [key for key in ("position_ids", "labels") if key not in batch]
        if missing:
            raise ValueError(
                f"batch without {' and '.join(missing)}: a token's place in its sequence and its target are lost by the cut; let the "
                "collator make them (position_ids=arange(T) for each row)"
            )
        batch = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
        batches: list[dict] = [{}] * self.sp_world_size
        dist.all_gather_object(batches, batch, group=self.sp_group)
        self.micro_batches.extend(self._own_part(found) for found in batches)

    def _own_part(self, batch: dict) -> dict:
        length, ranks = batch["input_ids"].shape[1], self.sp_world_size
        if length % ranks:
            raise ValueError(f"sequences of {length} tokens over {ranks} ranks: pad them to a multiple of {ranks}")
        labels = nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)
        batch["shift_labels"] = labels[..., 1:]
        size = length // ranks
        own = slice(size * self.sp_rank, size * (self.sp_rank + 1))
        return {key: value[:, own].contiguous() if isinstance(value, Tensor) else value for key, value in batch.items()}


def _check_mask(mask: object) -> None:
    """Checks that no mask is lost. The causal mask of this rank's tokens, which Hugging Face may pass, is redundant."""
    if mask is None or not isinstance(mask, Tensor) or mask.ndim == 2:
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise ValueError(_MASK)
        return
    seen = mask if mask.dtype is torch.bool else mask == 0
    causal = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()
    if not bool((seen == causal).all()):
        raise ValueError(_MASK)


_MASK = (
    "attention_mask: padding is not seen by attention over divided sequences; leave it out of the batch and let labels of -100 mark padded "
    "tokens at the end of a row"
)
