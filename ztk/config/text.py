"""How a run reads text, and turns chats and prompts into tokens."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ztk.core.policies.config import Config
from ztk.core.policies.data import ChatTemplateName, OnError, Packing
from ztk.core.policies.records import run_folder
from ztk.core.policies.runs import BYTES, data_paths, has_tokenizer, reads_documents

if TYPE_CHECKING:
    from ztk.data import ByteTokenizer, SubwordTokenizer, TextPolicy
    from ztk.rl.align import Encoding


def tokenizer_of_run(path: str | os.PathLike) -> Path | None:
    """Returns the tokenizer in a run's folder, or None. path: the folder, or one of its checkpoints."""
    run = run_folder(path)
    found = None if run is None else run / "tokenizer"
    return found if found is not None and (found / "tokenizer.json").is_file() else None


def have_same_tokenizer(one: Path, *, other: Path) -> bool:
    """Returns whether both folders have the same tokenizer.json."""
    files = [folder.expanduser() / "tokenizer.json" for folder in (one, other)]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def text_policy(config: Config) -> "TextPolicy":
    """Returns the text policy of a checked configuration."""
    from ztk.data import ReadPolicy, TextPolicy  # imported late: torch takes a second

    data = config.data
    return TextPolicy(
        paths=None if data.path is None else tuple(data_paths(config)),
        tokenizer=data.tokenizer or BYTES,
        vocab_size=data.vocab_size,
        weights=None if data.mixture is None else tuple(data.mixture),
        read=ReadPolicy(
            field=data.field or "text", skips=data.on_error is OnError.skip, share=data.validation_fraction or 0.0
        ),
        keeps_apart=data.packing is Packing.documents,
    )


def open_tokenizer(config: Config) -> "ByteTokenizer | SubwordTokenizer":
    """Opens the tokenizer of `data.tokenizer`. Raises ValueError for a folder without one that can be used."""
    from ztk.data import ByteTokenizer, SubwordTokenizer  # imported late: torch takes a second

    return SubwordTokenizer.open(str(config.data.tokenizer)) if has_tokenizer(config) else ByteTokenizer()


def encoding_of(config: Config) -> "Encoding":
    """Returns the tokens of chats, preferences and prompts: of `data.tokenizer`, or bytes without one. Built-in prompts are bytes."""
    from ztk.rl.align import Encoding  # imported late: torch takes a second

    data = config.data
    if data.path is not None and has_tokenizer(config):
        by_template = data.chat_template is ChatTemplateName.tokenizer
        return Encoding(tokenizer=open_tokenizer(config), by_template=by_template)
    return Encoding() if data.stop is None else Encoding(stop=data.stop)


def prepare_text(config: Config, *, show: Callable[[int, int, float], None]) -> None:
    """Tokenises the text of a run before its ranks start, unless an earlier run has cached it.

    show: called with the documents and bytes of text so far, and the fraction of the files that is read.

    Raises:
        ValueError: bad input, with file and place.
    """
    if not reads_documents(config):
        return
    from ztk.data import open_tokens

    open_tokens(text_policy(config), progress=lambda done: show(done.documents, done.nbytes, done.share))
