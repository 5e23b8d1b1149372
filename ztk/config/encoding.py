"""Opens the tokenizer of a run's texts."""

from typing import TYPE_CHECKING

from ztk.config.text import open_tokenizer
from ztk.core.policies.config import Config
from ztk.core.policies.data import ChatTemplateName
from ztk.core.policies.runs import has_tokenizer

if TYPE_CHECKING:
    from ztk.rl.align import Encoding


def encoding_of(config: Config) -> "Encoding":
    """Returns the tokens of chats, preferences and prompts: of `data.tokenizer`, or bytes without one. Built-in prompts are bytes."""
    from ztk.rl.align import Encoding  # imported late: torch takes a second

    data = config.data
    if data.path is not None and has_tokenizer(config):
        by_template = data.chat_template is ChatTemplateName.tokenizer
        return Encoding(tokenizer=open_tokenizer(config), by_template=by_template)
    return Encoding() if data.stop is None else Encoding(stop=data.stop)
