"""A modern decoder in plain modules without parallelism: one rank, one device, called like any torch model."""

from ztk.nn.config import DecoderConfig
from ztk.nn.decoder import Decoder
from ztk.nn.documents import Documents
from ztk.nn.initial import initial_values, initialise
from ztk.nn.sample import sample_text, sample_tokens

__all__ = ["Decoder", "DecoderConfig", "Documents", "initial_values", "initialise", "sample_text", "sample_tokens"]
