"""`generate` of `init_inference`: with ztk's inference engine if its answer is the same, else with the module's own loop, for example for
beams.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ztk.deepspeed.generation.asked import is_watched, read_call
from ztk.inference import Generator, InferencePolicy
from ztk.inference.capacity import free_memory

_MOST_SEQUENCES = 64


class EngineGeneration:
    """Answers calls of `generate` with a `Generator`, which is created on the first call and reads the weights again after they change.

    model: a causal transformers language model in fp32 on the CPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator: Generator | None = None
        self.reason = _reason_against(model)

    def answer(self, args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
        """Returns int64 [B n, T + longest answer] in transformers' layout, or None if the module's own loop must answer.

        Raises:
            FloatingPointError: logits are not finite.
        """
        if self.reason is not None or is_watched(self._model):
            return None
        asked = read_call(self._model, args=args, kwargs=kwargs)
        if isinstance(asked, str):
            return None
        generator = self._opened()
        if generator is None or asked.longest > generator.max_len:
            return None
        found = asked.answered_by(generator)
        generator.forget_prefixes()
        return found

    def _opened(self) -> Generator | None:
        """Returns None for a model that the engine does not support."""
        if self._generator is None:
            try:
                self._generator = Generator(self._model, policy=InferencePolicy(max_sequences=_MOST_SEQUENCES))
            except ValueError as error:
                self.reason = str(error)
        elif self._generator.read.changed() is not None:
            self._generator.load(self._model)
        return self._generator


def _reason_against(model: Any) -> str | None:
    parameters = list(model.parameters())
    if any(parameter.dtype != torch.float32 for parameter in parameters):
        return "weights of 16 bits would be widened, which takes twice their memory"
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return "the inference engine computes on the CPU"
    if sum(parameter.nbytes for parameter in parameters) > free_memory():
        return "its copy of the linear layers does not fit into memory"
    return None
