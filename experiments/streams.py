"""Opens a rank's batches from the checked configuration."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ztk.config import Config, is_own, reads_documents, text_policy
from ztk.core.runtime import Process
from ztk.data import (
    Batch,
    ByteCorpus,
    ItemBatch,
    Share,
    Stream,
    SubwordTokenizer,
    SyntheticStream,
    TokenCorpus,
    TokenStream,
    held_out_batches,
    held_out_items,
    open_tokens,
)
from ztk.experiments.user_objects import own_data
from ztk.nn import Documents
from ztk.parallel.pipeline import MicroBatch
from ztk.report import RunFolder

Corpus = ByteCorpus | TokenCorpus


def open_corpus(config: Config, *, process: Process) -> Corpus | None:
    """Opens the text and saves its tokenizer in the run folder. Returns None for synthetic tokens.

    Raises ValueError if machines have different texts with the same names.
    """
    if is_own(config, section="data") or config.data.name == "synthetic":
        return None
    corpus = _opened(config)
    if process.rank == 0 and isinstance(corpus, TokenCorpus) and isinstance(corpus.tokenizer, SubwordTokenizer):
        corpus.tokenizer.save(RunFolder(config.output_dir).tokenizer)
    digests = process.comm.gather_objects(corpus.digest)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"data={config.data.name}: ranks {others} read another text than rank 0; use data=files data.path=FOLDER with one "
            "folder that all machines share"
        )
    return corpus


def _opened(config: Config) -> Corpus:
    if reads_documents(config):
        return open_tokens(text_policy(config))
    return ByteCorpus.open(config.data.path, validation_fraction=config.data.validation_fraction)


def open_data(config: Config, *, corpus: Corpus | None, process: Process) -> tuple[Any, list[Any]]:
    """Returns the stream of training batches, and this rank's part of `train.eval_batches` global batches for validation."""
    if not is_own(config, section="data"):
        return open_stream(config, corpus=corpus, process=process), open_held_out(
            config, corpus=corpus, process=process
        )
    share = share_of(config, process=process)
    stream, held_out = own_data(config, share=share)
    if held_out is None or not config.train.eval_batches:
        return stream, []
    wanted, seed = held_out_sequences(config), config.train.seed
    return stream, held_out_items(held_out, share=share, num_items=wanted, seed=seed)


def open_stream(config: Config, *, corpus: Corpus | None, process: Process) -> Stream:
    share = share_of(config, process=process)
    options = {"seq_len": config.data.seq_len, "share": share, "seed": config.train.seed}
    if corpus is None:
        return SyntheticStream(vocab_size=config.model.vocab_size, **options)
    if isinstance(corpus, TokenCorpus):
        return corpus.stream(**options)
    return TokenStream(corpus.train, digest=corpus.digest, **options)


def open_held_out(config: Config, *, corpus: Corpus | None, process: Process) -> list[Batch]:
    """Returns this rank's part of `train.eval_batches` global batches for validation; none for synthetic tokens."""
    if corpus is None or not config.train.eval_batches:
        return []
    share, seq_len, wanted = share_of(config, process=process), config.data.seq_len, held_out_sequences(config)
    if not isinstance(corpus, TokenCorpus):
        return list(held_out_batches([corpus.validation], seq_len=seq_len, share=share, num_sequences=wanted))
    if not config.data.validation_fraction:
        return []
    return list(corpus.held_out_batches(seq_len=seq_len, share=share, num_sequences=wanted))


def held_out_sequences(config: Config) -> int:
    """Returns the largest number of sequences per evaluation, over all ranks."""
    return config.train.eval_batches * config.train.global_batch_size


def share_of(config: Config, *, process: Process) -> Share:
    return Share(
        micro_batch=config.train.micro_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        global_batch=config.train.global_batch_size,
        rank=process.mesh.replica,
        world_size=process.mesh.replicas,
    )


def model_call(batch: Any, *, takes_batches: bool, device: torch.device) -> MicroBatch:
    """Returns a model's arguments for a batch of the stream.

    takes_batches: a user's model takes the batch as its only argument. ztk's and transformers' models take tokens, targets and documents.
    """
    if isinstance(batch, Batch):
        placed = on_device(batch, device=device)
        documents = () if batch.positions is None else (Documents.at(batch.positions).to(device),)
        args = (placed.tokens, placed.targets, *documents)
        return MicroBatch(args=(args,) if takes_batches else args, weight=batch.weight, token_weight=batch.token_weight)
    items, weight = (batch.items, batch.weight) if isinstance(batch, ItemBatch) else (batch, 1.0)
    items = tree_on_device(items, device=device)
    spread = not takes_batches and isinstance(items, tuple | list)
    return MicroBatch(args=tuple(items) if spread else (items,), weight=weight)


def tree_on_device(items: Any, *, device: torch.device) -> Any:
    """Copies tensors in nested containers as `on_device` does."""
    if device.type == "cpu":
        return items

    def placed(leaf: Any) -> Any:
        return leaf.pin_memory().to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(placed, items)


def on_device(batch: Batch, *, device: torch.device) -> Batch:
    """Copies asynchronously: a copy from pinned memory to a GPU does not block the host."""
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        tokens=batch.tokens.pin_memory().to(device, non_blocking=True),
        targets=batch.targets.pin_memory().to(device, non_blocking=True),
    )
