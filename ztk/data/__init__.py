"""Token streams with resumable state: bytes of text, tokenised documents, or synthetic tokens for benchmarks."""

from ztk.data.corpus import ByteCorpus
from ztk.data.items import ItemBatch, ItemStream, held_out_items
from ztk.data.mixture import held_out_batches
from ztk.data.stream import Batch, Share, Stream, SyntheticStream, TokenStream
from ztk.data.subword import SubwordTokenizer
from ztk.data.tokencache import ReadPolicy
from ztk.data.tokenizer import ByteTokenizer
from ztk.data.tokens import TextPolicy, TokenCorpus, open_tokens

__all__ = [
    "Batch",
    "ByteCorpus",
    "ByteTokenizer",
    "ItemBatch",
    "ItemStream",
    "ReadPolicy",
    "Share",
    "Stream",
    "SubwordTokenizer",
    "SyntheticStream",
    "TextPolicy",
    "TokenCorpus",
    "TokenStream",
    "held_out_batches",
    "held_out_items",
    "open_tokens",
]
