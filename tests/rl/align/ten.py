"""Ten small tokenizers of different kinds in folders as transformers writes them, each with a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "hello world you",
    "hello world, how are you? I am fine.\n\nAnd you?",
    "2 + 2 = four; na\u00efve caf\u00e9 \u2211",
    "system user assistant short it is 4",
] * 4
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}<|im_start|>\n\n{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_start|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }} {{ eos_token }}"
    "{% else %}{{ bos_token }}[INST] {{ message['content'] }} [/INST]{% endif %}{% endfor %}"
)
MARKED = (  # {% generation %} closes in front of the end
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level(*, vocab_size: int = 320) -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), initial_alphabet=_LETTERS, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    return inner


def _pieces(*, normalizer=None, pre_tokenizer=None) -> Tokenizer:
    """As SentencePiece's BPE: pieces with U+2581 for spaces, and bytes for unknown letters."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizers.Metaspace(prepend_scheme="always")
    if normalizer is not None:
        inner.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=[*_SPECIAL, *_BYTES], show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    if pre_tokenizer is not None or normalizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Bytes are plain tokens, not special ones.
    state = json.loads(inner.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in _SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


def _around(inner: Tokenizer, single: str) -> Tokenizer:
    named = [(token, inner.token_to_id(token)) for token in single.split() if token != "$A"]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return inner


def _with_gaps() -> Tokenizer:
    """Ids from 300 on are 50 higher."""
    state = json.loads(_byte_level().to_str())
    state["model"]["vocab"] = {
        token: number + 50 * (number >= 300) for token, number in state["model"]["vocab"].items()
    }
    return Tokenizer.from_str(json.dumps(state))


def _unigram() -> Tokenizer:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = list(_SPECIAL)
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=special,
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=list("0123456789"),
    )
    inner.train_from_iterator(TEXTS, trainer)
    return _around(inner, "$A </s>")


def _word_piece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=list(_SPECIAL), show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    return _around(inner, "<s> $A </s>")


def _with_words() -> Tokenizer:
    """Tokens that absorb adjacent spaces, and an ordinary token that ends answers, like Phi-3's."""
    inner = _around(_pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), "<s> $A")
    inner.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False), AddedToken("<tool>", lstrip=True)])
    return inner


def _trimming() -> Tokenizer:
    inner = _byte_level()
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    return inner


_LEGACY = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
_NO_PREFIX = normalizers.Replace(" ", "\u2581")
# name: how it is made, its chat template, the token that ends a text, keys of tokenizer_config.json
TEN = {
    "bytes, spaces trimmed": (_trimming, CHATML, "</s>", {}),
    "bytes, <s>": (lambda: _around(_byte_level(), "<s> $A"), LLAMA_3, "<|im_end|>", {}),
    "bytes, <s> and </s>": (lambda: _around(_byte_level(), "<s> $A </s>"), MARKED, "</s>", {"add_bos_token": False}),
    "bytes, gaps in ids": (_with_gaps, CHATML, "<|im_end|>", {}),
    "pieces, a prefix per segment": (lambda: _around(_pieces(normalizer=_LEGACY), "<s> $A"), LLAMA_2, "</s>", {}),
    "pieces, one prefix": (
        lambda: _around(_pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), "<s> $A"),
        LLAMA_2,
        "</s>",
        {"tokenizer_class": "LlamaTokenizerFast", "legacy": False},
    ),
    "pieces, no prefix": (lambda: _around(_pieces(normalizer=_NO_PREFIX), "<s> $A"), CHATML, "</s>", {}),
    "pieces, added tokens": (_with_words, CHATML.replace("<|im_end|>", "<|end|>"), "</s>", {}),
    "unigram, </s>": (_unigram, CHATML, "</s>", {}),
    "words, <s> and </s>": (_word_piece, MARKED, "</s>", {"split_special_tokens": False}),
}


def save_one(name: str, *, path: Path) -> Path:
    """Writes the folder of one of `TEN`."""
    make, template, end, more = TEN[name]
    path.mkdir(parents=True)
    make().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": end,
        "unk_token": "<unk>",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings | more))
    return path
