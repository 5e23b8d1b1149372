"""A modern decoder in plain modules without parallelism: one rank, one device, called like any torch model."""

from ztk.nn.config import DecoderConfig
from ztk.nn.decoder import Decoder
from ztk.nn.documents import Documents
from ztk.nn.initial import initial_values, initialise

__all__ = ["Decoder", "DecoderConfig", "Documents", "initial_values", "initialise"]
