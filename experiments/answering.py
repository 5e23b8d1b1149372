"""What `task=generate`, `task=serve` and `task=eval` share: the engine and the usual sampling of a configuration."""

from dataclasses import dataclass
from pathlib import Path

from ztk.config import Config
from ztk.inference import Generator, InferencePolicy, SamplingParams, perplexity, perplexity_of_stored
from ztk.serve.models import Opened

_HELD_OUT_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Perplexity of held-out text with the weights as stored, and in the chosen format."""

    stored: float
    chosen: float


def build_generator(config: Config, *, opened: Opened) -> Generator:
    """The engine over an opened model."""
    return Generator(opened.module, policy=_policy(config))


def cost_of_weights(config: Config, *, opened: Opened, generator: Generator) -> Cost | None:
    """What `inference.weights` changes on `inference.held_out`, printed; None without such a text.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    chosen = config.inference
    if chosen.held_out is None:
        return None
    text = Path(chosen.held_out).read_text(encoding="utf-8", errors="replace")
    tokens = opened.tokenizer.encode(text)[:_HELD_OUT_TOKENS]
    if len(tokens) < 2:
        raise ValueError(f"inference.held_out={chosen.held_out}: has {len(tokens)} tokens; name a longer text")
    cost = Cost(stored=perplexity_of_stored(opened.module, tokens=tokens), chosen=perplexity(generator, tokens=tokens))
    print(
        f"perplexity of {len(tokens)} tokens of {chosen.held_out}: {cost.stored:.4f} as stored, {cost.chosen:.4f} with "
        f"weights={_format(config)} ({100 * (cost.chosen / cost.stored - 1):+.2f} %)",
        flush=True,
    )
    return cost


def release_module(opened: Opened) -> None:
    """Frees the module's own weights: the engine has copies of the layers, and keeps embeddings and norms."""
    opened.module.to("meta")


def _format(config: Config) -> str:
    weights = config.inference.weights
    assert weights is not None, "each of the tasks sets it"
    return weights.value


def _policy(config: Config) -> InferencePolicy:
    chosen = config.inference
    return InferencePolicy(
        max_sequences=chosen.max_sequences,
        max_step_tokens=chosen.max_step_tokens,
        max_model_len=chosen.max_model_len,
        lookup_tokens=chosen.lookup_tokens or 0,  # null with task=eval, which draws nothing
        weights=_format(config),
    )


def usual_sampling(config: Config) -> SamplingParams:
    """The sampling of `sampling.*`, without stop texts: those are the text's, not the engine's."""
    return SamplingParams(**{name: value for name, value in vars(config.sampling).items() if name != "stop"})
