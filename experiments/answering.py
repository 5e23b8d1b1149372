"""What `task=generate` and `task=serve` share: the engine and the usual sampling of a configuration."""

from ztk.config import Config
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.serve.models import Opened


def build_generator(config: Config, *, opened: Opened) -> Generator:
    """The engine over an opened model."""
    chosen = config.inference
    policy = InferencePolicy(
        max_sequences=chosen.max_sequences,
        max_step_tokens=chosen.max_step_tokens,
        max_model_len=chosen.max_model_len,
        lookup_tokens=chosen.lookup_tokens,
    )
    return Generator(opened.module, policy=policy)


def usual_sampling(config: Config) -> SamplingParams:
    """The sampling of `sampling.*`, without stop texts: those are the text's, not the engine's."""
    return SamplingParams(**{name: value for name, value in vars(config.sampling).items() if name != "stop"})
