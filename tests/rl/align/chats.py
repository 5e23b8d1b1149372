"""A tokenizer with a chat template in a folder."""

from pathlib import Path

from ztk.rl.align import ChatTemplate

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "BEFORE{{ message['content'] }}<|im_end|>AFTER\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = CHATML.replace("BEFORE", "").replace("AFTER", "")
CHAT = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": "2 + 2 ?"},
    {"role": "assistant", "content": "it is 4"},
    {"role": "user", "content": "and 3 + 3 ?"},
    {"role": "assistant", "content": "6"},
]


def train_tokenizer():
    """A byte-level BPE of transformers that has learnt `CHAT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, letters = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=special, initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator([message["content"] for message in CHAT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )


def save_tokenizer(tokenizer, *, path: Path, template: str | None) -> Path:
    """Saves `tokenizer` with a chat template and replaces the old one."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path, save_jinja_files=False)
    ChatTemplate.open.cache_clear()
    return path
