"""From the checked configuration to a rank's batches."""

from dataclasses import replace

import torch

from ztk.config import Config
from ztk.data import Batch, ByteCorpus, Share, SyntheticStream, TokenStream, held_out_batches
from ztk.runtime import Process


def open_corpus(config: Config, *, process: Process) -> ByteCorpus | None:
    """The text; None for synthetic tokens. Raises ValueError if machines have different texts under the same names."""
    if config.data.name == "synthetic":
        return None
    corpus = ByteCorpus.open(config.data.path, validation_fraction=config.data.validation_fraction)
    digests = process.comm.gather_objects(corpus.digest)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"data={config.data.name}: ranks {others} read another text than rank 0; use data=files data.path=FOLDER with one "
            "folder that all machines share"
        )
    return corpus


def open_stream(config: Config, *, corpus: ByteCorpus | None, process: Process) -> TokenStream | SyntheticStream:
    share = share_of(config, process=process)
    options = {"seq_len": config.data.seq_len, "share": share, "seed": config.train.seed}
    if corpus is None:
        return SyntheticStream(vocab_size=config.model.vocab_size, **options)
    return TokenStream(corpus.train, digest=corpus.digest, **options)


def open_held_out(config: Config, *, corpus: ByteCorpus | None, process: Process) -> list[Batch]:
    """This rank's part of `train.eval_batches` global batches to validate on; none for synthetic tokens."""
    if corpus is None or not config.train.eval_batches:
        return []
    share = share_of(config, process=process)
    wanted = config.train.eval_batches * share.global_batch
    return list(held_out_batches(corpus.validation, seq_len=config.data.seq_len, share=share, num_sequences=wanted))


def share_of(config: Config, *, process: Process) -> Share:
    return Share(
        micro_batch=config.train.micro_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        global_batch=config.train.global_batch_size,
        rank=process.mesh.replica,
        world_size=process.mesh.replicas,
    )


def on_device(batch: Batch, *, device: torch.device) -> Batch:
    """Copies beside the host's work: from pinned memory a copy to a GPU waits for nothing."""
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        tokens=batch.tokens.pin_memory().to(device, non_blocking=True),
        targets=batch.targets.pin_memory().to(device, non_blocking=True),
    )
