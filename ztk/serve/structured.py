"""Grammars of answers, by the library llguidance: JSON, schemas, regular expressions, choices, and grammars of Lark or GBNF.

A request's grammar is compiled once. Each answer has its own copy of the matcher, which computes the next mask in a thread while the
model computes the next logits.
"""

import functools
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ztk.serve.schemas import check_embedded, library, prepared
from ztk.serve.tokenizers import Tokenizer
from ztk.serve.values import BadRequest, flag, shown, thing

_OBJECT = {"type": "object"}
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_GUIDED |= {"json_schema": "json", "grammar": "grammar"}  # llama.cpp's
STRUCTURE_FIELDS = ("response_format", "structured_outputs", *_GUIDED)
_THREADS, _KEPT = 2, 64  # for masks; compiled grammars
_CHARACTERS, _DEPTH = 1 << 16, 100  # of a grammar, and nested brackets in it
_CHOICES = 1024
_WHITE = r"( |\n{1,2}[ \t]{0,20})?"  # between the tokens of JSON; limited, so that an answer cannot consist of endless spaces
_WORD = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The language of answers. kind: json (text: a schema), regex, choice (text: a JSON list), lark, or grammar, which is Lark or GBNF.
    param: the request's field.
    """

    kind: str
    text: str
    param: str


def read_structure(body: dict) -> Structure | None:
    """Returns the structure requested with vLLM's, OpenAI's or llama.cpp's fields, or None for any text.

    Raises:
        BadRequest: an unknown format, a value of the wrong type or too large, or two structures.
    """
    guided = [(kind, body[name], name) for name, kind in _GUIDED.items() if name in body]
    found = [
        Structure(kind=kind, text=_text(kind, value=value, param=param), param=param)
        for kind, value, param in itertools.chain(_of_format(body), guided, _of_outputs(body))
    ]
    if len(found) > 1:
        raise BadRequest(f"{found[0].param} and {found[1].param} exclude each other: send one", param=found[1].param)
    if not found:
        return None
    check_size(found[0].text, param=found[0].param)
    return found[0]


def check_size(text: str, *, param: str) -> None:
    """Raises BadRequest for a grammar, or its source, that is too long or nested too deeply."""
    if len(text) > _CHARACTERS or _depth(text) > _DEPTH:
        raise BadRequest(f"{param} may have {_CHARACTERS} characters and {_DEPTH} nested brackets at most", param=param)


def _of_format(body: dict) -> Iterator[tuple[str, Any, str]]:
    """Yields kind, value and field of OpenAI's response_format."""
    chosen, param = thing(body, name="response_format"), "response_format"
    kind = chosen.get("type", "text")
    if kind == "json_object":
        yield "json", _OBJECT, param
    elif kind == "json_schema":
        named = chosen.get("json_schema")
        schema = named.get("schema", named.get("json_schema")) if isinstance(named, dict) else None
        yield "json", chosen.get("schema") if schema is None else schema, param
    elif kind != "text":
        raise BadRequest(f"response_format.type={shown(kind)}: must be text, json_object or json_schema", param=param)


def _of_outputs(body: dict) -> Iterator[tuple[str, Any, str]]:
    """Yields kind, value and field of each of vLLM's structured_outputs."""
    chosen = {name: value for name, value in thing(body, name="structured_outputs").items() if value is not None}
    for name, value in chosen.items():
        if name in ("json", "regex", "choice", "grammar"):
            yield name, value, f"structured_outputs.{name}"
        elif name == "json_object":
            if value is True:
                yield "json", _OBJECT, name
        elif name in ("disable_any_whitespace", "disable_additional_properties"):
            if flag(chosen, name=name):
                raise BadRequest(
                    f"structured_outputs.{name}=true is not supported: leave it out", param="structured_outputs"
                )
        elif name != "disable_fallback":
            raise BadRequest(
                f"structured_outputs.{shown(name)} is not supported: send json, regex, choice, grammar or json_object",
                param="structured_outputs",
            )


def _text(kind: str, *, value: object, param: str) -> str:
    """Returns the text of a structure, after checks of its type and size."""
    if kind == "json":
        return _schema(value, param=param)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise BadRequest(f"{param} must be a list of texts", param=param)
        if len(value) > _CHOICES:
            raise BadRequest(f"{param} may have {_CHOICES} texts at most, and has {len(value)}", param=param)
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param} must be a text", param=param)
    if kind == "grammar":
        check_size(value, param=param)
        check_embedded(value, param=param)
    return value


def _schema(value: object, *, param: str) -> str:
    """Returns the schema as text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found, ensure_ascii=False)
    except (ValueError, RecursionError):
        found = text = None
    if not isinstance(found, dict) or text is None:
        raise BadRequest(f"{param} must have a JSON schema, which is an object", param=param)
    check_size(text, param=param)
    return json.dumps(prepared(found, param=param), ensure_ascii=False)


def _depth(text: str) -> int:
    """Returns the largest depth of open brackets, including brackets in texts."""
    depth = most = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        most = max(most, depth)
    return most


class Grammars:
    """Compiles the grammars of requests for one tokenizer. vocabulary: number of tokens that may be sampled. ends: tokens that end an
    answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, tuple(ends)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ztk-serve-masks")
        self.compiled = functools.lru_cache(maxsize=_KEPT)(self._compiled)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _words(self) -> Any:
        """llguidance's tokenizer. A vocabulary without an end token gets an additional one, which is never sampled."""
        ends = [end for end in self._ends if end < self._vocabulary] or [self._vocabulary]
        named = [self._tokenizer.token_bytes(token) or b"" for token in range(self._vocabulary)]
        words = _Tokens(
            tokens=[*named, b""][: max(self._vocabulary, *(end + 1 for end in ends))],
            special=[*(token for token in self._tokenizer.special if token < self._vocabulary), *ends],
            end=ends[0],
            encode=self._tokenizer.encode_text,
        )
        wrapper = library()._tokenizer.TokenizerWrapper(words)
        return library().LLTokenizer(wrapper, n_vocab=len(words.tokens), eos_token=ends)

    def _compiled(self, structure: Structure) -> "Compiled":
        """Compiles a grammar. Raises BadRequest for an invalid grammar, or one that the library does not support."""
        llguidance = library()
        with self._lock:
            words = self._words
        try:
            matcher = llguidance.LLMatcher(
                words,
                _grammar(structure, llguidance=llguidance),
                log_level=0,
                limits=llguidance.LLParserLimits(verbose_errors=False),
            )
            if not matcher.is_error():
                first = matcher.deep_copy()
                first.compute_bitmask()
                matcher = first if first.is_error() else matcher
        except Exception as error:  # noqa: BLE001  # of the library's readers, about the request's text
            raise BadRequest(f"{structure.param}: {_line(str(error))}", param=structure.param) from None
        if matcher.is_error():
            raise BadRequest(f"{structure.param}: {_reason(matcher)}", param=structure.param)
        return Compiled(
            matcher,
            fake=None if any(end < self._vocabulary for end in self._ends) else self._vocabulary,
            pool=self._pool,
        )


class Compiled:
    """A compiled grammar. fake: a token of the matcher that the model does not have."""

    def __init__(self, matcher: Any, *, fake: int | None, pool: ThreadPoolExecutor) -> None:
        self._matcher, self._fake, self._pool = matcher, fake, pool

    def begin(self) -> "Followed":
        return Followed(self._matcher.deep_copy(), fake=self._fake, pool=self._pool)


class Followed:
    """A matcher for one answer. The thread that computes the next mask owns it until `mask` or `advance` is called."""

    def __init__(self, matcher: Any, *, fake: int | None, pool: ThreadPoolExecutor) -> None:
        self._matcher, self._fake, self._pool = matcher, fake, pool
        self._taken: list[int] = []
        self._next: Future[Tensor] | None = pool.submit(self._computed)

    def mask(self, answer: list[int]) -> Tensor | None:
        """Returns the mask. Raises ValueError if the grammar's state has become too large."""
        ready, self._next = self._next, None
        if ready is not None:
            words = ready.result()
            if answer == self._taken:
                return words
        return self._computed() if self._follow(answer) else None

    def advance(self, answer: list[int]) -> bool:
        if self._next is not None:
            self._next.exception()  # `mask` raises it again
            self._next = None
        self._follow(answer)
        if not self._matcher.is_error() and self._matcher.is_stopped():
            return True
        self._next = self._pool.submit(self._computed)
        return False

    def _follow(self, answer: list[int]) -> bool:
        """Rolls back guesses and adds new tokens. Returns False if the grammar does not allow them."""
        same = len(self._taken)
        if answer[:same] != self._taken:
            pairs = enumerate(zip(self._taken, answer, strict=False))
            same = next((place for place, (own, one) in pairs if own != one), min(same, len(answer)))
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        new = answer[same:]
        if self._matcher.validate_tokens(new) < len(new):
            return False
        self._matcher.consume_tokens(new)
        self._taken += new
        return True

    def _computed(self) -> Tensor:
        """Returns int32 [words] after the accepted tokens."""
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(_reason(self._matcher))
        words = torch.frombuffer(bytearray(found), dtype=torch.int32)
        if self._fake is not None:
            words[self._fake // _WORD] &= ~(1 << self._fake % _WORD) if self._fake % _WORD < _WORD - 1 else 0x7FFFFFFF
        return words


def _reason(matcher: Any) -> str:
    """Returns the error of a matcher in one line."""
    text = matcher.get_error()
    return "no text matches it" if text.startswith("NoExtension") else _line(text.partition("\n<state>")[0])


def _line(text: str) -> str:
    return shown(" ".join(text.split()))


class _Tokens:
    """A vocabulary in llguidance's interface."""

    bos_token_id = None

    def __init__(self, *, tokens: list[bytes], special: list[int], end: int, encode: Any) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts alone")
        return list(self._encode(text))


def _grammar(structure: Structure, *, llguidance: Any) -> str:
    """Returns the grammar in the library's format."""
    matcher, text = llguidance.LLMatcher, structure.text
    if structure.kind == "json":
        return matcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    if structure.kind == "regex":
        return matcher.grammar_from_regex(text)
    if structure.kind == "choice":
        texts = [json.dumps(one) for one in json.loads(text)]
        return matcher.grammar_from_lark("start: " + " | ".join(texts))
    if structure.kind == "grammar":
        return llguidance.grammar_from("grammar", text)
    return matcher.grammar_from_lark(text)


JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": _WHITE}
