"""Token streams with resumable state: bytes of real text, or synthetic tokens for benchmarks."""

from ztk.data.corpus import ByteCorpus
from ztk.data.stream import Batch, Share, SyntheticStream, TokenStream, held_out_batches
from ztk.data.tokenizer import ByteTokenizer

__all__ = ["Batch", "ByteCorpus", "ByteTokenizer", "Share", "SyntheticStream", "TokenStream", "held_out_batches"]
