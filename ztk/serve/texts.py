"""Routes without generation: texts to tokens and back, and texts to vectors."""

import base64
import json
import struct
from typing import Any

from ztk.inference import Generator
from ztk.serve.bodies import Limits, read_prompts
from ztk.serve.messages import read_messages, read_options
from ztk.serve.models import Opened
from ztk.serve.replies import Reader
from ztk.serve.text import TextStream
from ztk.serve.tokenizers import token_name
from ztk.serve.tools import read_tools
from ztk.serve.values import BadRequest, flag, parsed, shown, token_list

_TOKENS = 1 << 20  # of a text to detokenise


class Texts:
    """Answers bodies of /tokenize, /detokenize and /v1/embeddings. Used in threads."""

    def __init__(self, generator: Generator, *, opened: Opened, reader: Reader, limits: Limits) -> None:
        self._generator, self._opened, self._reader, self._limits = generator, opened, reader, limits

    def tokenize(self, raw: bytes) -> bytes:
        """Returns the tokens of vLLM's `prompt`, or of `messages`. Raises BadRequest for a body without them."""
        body = parsed(raw)
        if "messages" in body:
            tools = read_tools(body)
            options = read_options(body, tools=() if tools is None else tools.given)
            tokens = self._reader.chat_tokens(read_messages(body), options=options)
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise BadRequest("prompt must be a text", param="prompt")
            tokens = self._reader.tokens(prompt, has_beginning=flag(body, name="add_special_tokens", usual=True))
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self._generator.max_len, "tokens": tokens}
        if flag(body, name="return_token_strs"):
            own = self._opened.tokenizer.token_bytes
            found["token_strs"] = [token_name(token, own=own(token)) for token in tokens]
        return json.dumps(found).encode()

    def detokenize(self, raw: bytes) -> bytes:
        """Returns the text of `tokens`, including special ones. Raises BadRequest for others."""
        tokens = token_list(parsed(raw), name="tokens", most=_TOKENS)
        self._check(tokens)
        stream = TextStream(self._opened.tokenizer, shows_special=True)
        text = "".join([*map(stream.push, tokens), stream.finish()])
        return json.dumps({"prompt": text}).encode()

    def embeddings(self, raw: bytes) -> bytes:
        """Returns a vector for each `input`, in OpenAI's format. Raises BadRequest for invalid or too long inputs."""
        body = parsed(raw)
        name = body.get("model")
        adapter = self._reader.adapter(None if name is None else str(name))
        kind = body.get("encoding_format", "float")
        if kind not in ("float", "base64"):
            raise BadRequest(f"encoding_format={shown(kind)}: must be float or base64", param="encoding_format")
        if "dimensions" in body:
            raise BadRequest("dimensions is not supported: leave it out", param="dimensions")
        inputs = read_prompts(body, name="input")
        if len(inputs) > self._limits.answers:
            raise BadRequest(
                f"{len(inputs)} inputs, and this server takes {self._limits.answers} at a time", param="input"
            )
        prompts = [self._reader.tokens(one, has_beginning=True) for one in inputs]
        for prompt in prompts:
            self._check(prompt)
        vectors = [self._generator.embed(prompt, adapter=adapter).tolist() for prompt in prompts]
        if kind == "base64":
            vectors = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
        used = sum(map(len, prompts))
        return json.dumps(
            {
                "object": "list",
                "model": adapter or self._opened.name,
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
                ],
                "usage": {"prompt_tokens": used, "total_tokens": used},
            }
        ).encode()

    def _check(self, tokens: list[int] | tuple[int, ...]) -> None:
        size = self._generator.description.vocab_size
        odd = next((token for token in tokens if not 0 <= token < size), None)
        if odd is not None:
            raise BadRequest(f"token {odd} is outside the vocabulary of {size}")
