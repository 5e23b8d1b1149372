"""A model for EleutherAI's lm-evaluation-harness: `--model ztk`. It needs `pip install "ztk[harness]"`.

    python -m ztk.serve.harness run --model ztk --model_args model=RUN --tasks TASK
    python -m ztk.serve.harness run --model ztk --model_args model=FOLDER,weights=int8 --tasks TASK --include_path MY_TASKS

From Python: import this module, then `lm_eval.simple_evaluate(model="ztk", model_args={"model": "RUN"}, tasks=[...])`.

Texts are tokenised and split into windows as in the harness's own class for transformers (`--model hf`), so that results are comparable.
"""

import sys
from collections.abc import Iterator
from typing import Any

import lm_eval.models  # noqa: F401  # the harness's own models are registered once, by whoever is first
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import nn

from ztk.inference import Generator, InferencePolicy, Request, SamplingParams, log_likelihoods
from ztk.serve.models import open_model
from ztk.serve.text import TextStream

_AT_ONCE = 64  # sequences whose log-probabilities are in memory at the same time
_MAX_NEW = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names of the same number; the first one given counts
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


@register_model("ztk")
class HarnessModel(LM):
    """A ztk model for the harness. It runs on the CPU, in one process."""

    def __init__(
        self,
        model: str,
        *,
        weights: str = "stored",
        ema: bool = False,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_sequences: int | None = None,
        **ignored: object,
    ) -> None:
        """model: a run folder, a checkpoint, or a transformers folder.
        weights: stored (fp32), int8 or int4.
        ema: uses the moving average of the run's weights.
        max_length: tokens per window. Defaults to one less than the model's maximum, because the predicted last token counts too.
        max_gen_toks: answer length for tasks that do not set one.
        max_sequences: sequences per step.
        ignored: `batch_size`, `max_batch_size` and `device`, which the harness passes. They do not affect results.

        Raises:
            ValueError: unknown arguments, a `max_length` beyond the model's maximum, a device other than the CPU, or a tokenizer without
                a token to begin a text.
        """
        super().__init__()
        self._check_ignored(ignored)
        opened = open_model(model, ema=ema)
        if opened.first is None:
            raise ValueError(
                f"model={model}: the tokenizer has neither a bos_token nor an eos_token to begin a text with; name one in its "
                "tokenizer_config.json"
            )
        self.generator = Generator(opened.module, policy=InferencePolicy(weights=weights, max_sequences=max_sequences))
        if isinstance(opened.module, nn.Module):
            opened.module.to("meta")  # the generator has copies of the layers
        self._opened, self._first, self._new = opened, opened.first, max_gen_toks
        self.max_length = max_length or self.generator.max_len - 1
        if not 1 <= self.max_length < self.generator.max_len:
            raise ValueError(
                f"max_length={max_length}: the model takes {self.generator.max_len} tokens, one of which is the last that is predicted; "
                f"use max_length={self.generator.max_len - 1} or less"
            )

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name for the harness's cache of requests."""
        return self._opened.name

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Returns for each (context, continuation) the natural log-likelihood of the continuation, and whether it is the greedy one.

        A context that does not fit is truncated at the beginning.

        Raises:
            ValueError: a continuation that does not fit.
            FloatingPointError: as `generate_until`.
        """
        pairs = [self._pair(*request.args) for request in requests]
        if (longest := max((len(ending) for _, ending in pairs), default=0)) > self.max_length:
            raise ValueError(
                f"a continuation has {longest} tokens, and the model reads {self.max_length}: leave the task out"
            )
        return list(
            self._scored([([*context, *ending][-self.max_length - 1 :], len(ending)) for context, ending in pairs])
        )

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Returns the natural log-likelihood of each text in windows of `max_length` tokens, counting each token once.

        The first token follows the prefix token.
        """
        sequences = [[self._first, *self._opened.tokenizer.encode(request.args[0])] for request in requests]
        sizes = {"context": 1, "seq_len": self.max_length + 1, "stride": self.max_length}
        return log_likelihoods(self.generator, sequences=sequences, **sizes)

    def generate_until(self, requests: list) -> list[str]:
        """Returns the answer to each (context, options), up to the first of the texts `until` or the token that ends an answer.

        Raises:
            ValueError: an unsupported option, or an answer as long as the model's context.
            FloatingPointError: logits are not finite.
        """
        submitted = [self._submit(*request.args) for request in requests]
        streams = {request.id: stream for request, stream in submitted}
        texts = dict.fromkeys(streams, "")
        while self.generator.has_work:
            for output in self.generator.step():
                if output.error is not None:
                    raise FloatingPointError(output.error)
                number, stream = output.request_id, streams[output.request_id]
                if output.token is not None and output.token not in self._opened.ends:
                    texts[number] += stream.push(output.token)
                if stream.stopped:
                    self.generator.cancel(number)
        return [texts[request.id] + ("" if stream.stopped else stream.finish()) for request, stream in submitted]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenises a pair like the harness: spaces at the end of the context belong to the continuation, whose tokens are the rest of
        the joint tokens after the context's own.
        """
        tokenizer = self._opened.tokenizer
        if not context:
            ending = tokenizer.encode_text(continuation)
            return (ending[:1], ending[1:]) if ending[:1] == [self._first] else ([self._first], ending)
        shown = context.rstrip()
        joined, before = tokenizer.encode(context + continuation), tokenizer.encode(shown)
        return before or [self._first], joined[len(before) :]

    def _scored(self, pieces: list[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Scores pieces: tokens, and the number of scored tokens at their end."""
        for start in range(0, len(pieces), _AT_ONCE):
            several = pieces[start : start + _AT_ONCE]
            found = self.generator.score_tokens([tokens for tokens, _ in several])
            for (tokens, count), scores in zip(several, found, strict=True):
                ending = scores[len(scores) - count :]
                likeliest = all(
                    token in score.top for token, score in zip(tokens[len(tokens) - count :], ending, strict=True)
                )
                yield sum(score.value for score in ending), likeliest

    def _submit(self, context: str, options: dict[str, Any]) -> tuple[Request, TextStream]:
        given = dict(options)
        until = given.pop("until", None) or []
        limits = [value for name in _MAX_NEW if (value := given.pop(name, None)) is not None]
        limit = int(limits[0]) if limits else self._new
        temperature, draws = given.pop("temperature", None), given.pop("do_sample", None)
        if draws is False or (temperature is None and not draws):
            temperature = 0.0
        if unknown := sorted(set(given) - set(_SAMPLING)):
            raise ValueError(
                f"generation_kwargs: {', '.join(unknown)} are not known to ztk.Generator; leave them out of --gen_kwargs"
            )
        if limit >= self.max_length:
            raise ValueError(
                f"max_gen_toks={limit}: the model reads {self.max_length} tokens, prompt and answer; use a smaller max_gen_toks"
            )
        sampling = SamplingParams(
            max_tokens=limit,
            temperature=1.0 if temperature is None else float(temperature),
            stop_token_ids=self._opened.ends,
            **given,
        )
        prompt = (self._opened.tokenizer.encode(context) or [self._first])[limit - self.max_length :]
        stops = (until,) if isinstance(until, str) else tuple(until)
        return self.generator.submit(prompt, sampling=sampling), TextStream(self._opened.tokenizer, stops=stops)

    @staticmethod
    def _check_ignored(given: dict[str, object]) -> None:
        if unknown := sorted(set(given) - {"batch_size", "max_batch_size", "device"}):
            raise ValueError(
                f"model_args: {', '.join(unknown)} are not known; use model, weights, ema, max_length, max_gen_toks, max_sequences"
            )
        if given.get("device") not in (None, "cpu"):
            raise ValueError(
                f"device={given['device']}: ztk.Generator computes on the CPU; leave it out, or use --device cpu"
            )


def main() -> None:
    """Runs the harness's own command with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())


if __name__ == "__main__":
    main()
