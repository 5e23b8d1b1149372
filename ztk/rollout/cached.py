"""Samples by the inference engine, with a cache of keys and values: an answer of n tokens takes n steps of one row instead of n full forwards.

Torch's attention adds over the keys in another order than the engine's, so log-probabilities differ in their last bits, unless the trainer
computes by `rollout.attention`: the loss has to be corrected for it (`rollout.identity=corrected`), or may not care.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ztk.engine import Engine
from ztk.inference import Completion, Generator, InferencePolicy, SamplingParams
from ztk.nn.lora import merged_parameters
from ztk.rollout.buffer import Samples
from ztk.rollout.hybrid import Requests, RolloutPolicy, first_tokens

_MOST_SEQUENCES = 64  # in one step


class CachedRollouts:
    """Answers by a `Generator` that has a copy of the policy's weights, fp32 in main memory on every rank, adapters merged.

    The copy is made anew after every optimizer step that the policy has made, when the next samples are drawn.
    """

    def __init__(self, engine: Engine) -> None:
        self._source = _Merged(engine)
        self._generator: Generator | None = None
        self._step = -1  # the policy's, of the copy

    def generate(self, *, policy: RolloutPolicy, requests: Requests, step: int) -> Samples:
        """As `ztk.rollout.generate`; log-probabilities are the inference engine's. A collective call, but ranks draw independently.

        Raises:
            ValueError: a prompt that leaves no room for the answer, or a model that the inference engine does not compute.
            FloatingPointError: logits that are not finite.
        """
        tokens, lengths = first_tokens(policy, requests=requests)
        generator = self._loaded(policy)
        pairs = zip(requests.prompt_numbers.tolist(), requests.copies.tolist(), strict=True)
        sampling = [
            SamplingParams(
                max_tokens=policy.max_tokens,
                temperature=policy.temperature,
                stop_token_ids=(policy.stop,),
                seed=policy.seed,
                draw_key=("rollout", step, prompt, copy),
                fp32_logprobs=True,
            )
            for prompt, copy in pairs
        ]
        answers = generator.generate([list(prompt) for prompt in requests.prompts], sampling=sampling)
        completions = [completion for (completion,) in answers]
        return _samples(completions, tokens=tokens, lengths=lengths, requests=requests)

    def _loaded(self, policy: RolloutPolicy) -> Generator:
        steps = self._source.engine.global_steps
        if self._generator is None:
            options = InferencePolicy(max_sequences=_MOST_SEQUENCES, max_model_len=policy.length)
            self._generator = Generator(self._source, policy=options)
        elif self._step != steps:
            self._generator.load(self._source)
        self._step = steps
        return self._generator


class _Merged:
    """An engine as the generator reads one: its module, and its full parameters with adapters added to the weights beside them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self.zero = self

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """A collective call."""
        return merged_parameters(self.module, read=self.engine.zero.full_parameters)


def _samples(completions: list[Completion], *, tokens: Tensor, lengths: Tensor, requests: Requests) -> Samples:
    """tokens: the prompts' rows, int64 [S, T], into which the answers are written."""
    logprobs = torch.zeros(tokens.shape, dtype=torch.float32)
    for row, completion in enumerate(completions):
        if completion.finish_reason == "error":
            raise FloatingPointError(f"sample {int(requests.numbers[row])}: the policy's logits are not finite")
        first = int(lengths[row])
        places = slice(first, first + len(completion.tokens))
        tokens[row, places] = torch.tensor(completion.tokens, dtype=torch.int64)
        logprobs[row, places] = completion.processed_logprobs
    return Samples(
        tokens=tokens,
        numbers=requests.numbers,
        prompts=requests.prompt_numbers,
        prompt_lengths=lengths,
        answer_lengths=torch.tensor([len(completion.tokens) for completion in completions]),
        finished=torch.tensor([completion.finish_reason == "stop" for completion in completions]),
        logprobs=logprobs,
        rewards=torch.zeros(len(completions), dtype=torch.float64),
        included=torch.ones(len(completions), dtype=torch.bool),
    )
