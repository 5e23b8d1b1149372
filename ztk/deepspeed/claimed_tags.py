"""Which engine of this process saved which tag: two engines, a GAN's or an actor and its critic, must not replace each other's checkpoints."""

import weakref
from pathlib import Path
from typing import Any

from ztk.checkpoint.errors import SaveFailed
from ztk.deepspeed.log import logger

_DEFAULT, _LATEST = None, ""  # no tags
_saved: dict[tuple[Path, str | None], weakref.ref] = {}  # (folder, tag or one of these) -> the last engine


def claim_tag(engine: Any, *, folder: Path, tag: str, is_default: bool) -> None:
    """`engine` is about to save `tag`. is_default: the script named none.

    Raises SaveFailed if another engine that is not destroyed saved the same tag, or default tags, into `folder`.
    """
    folder = folder.resolve()
    for key in ((folder, tag), (folder, _DEFAULT)) if is_default else ((folder, tag),):
        if _is_anothers(key, engine=engine):
            what = f"tag {tag}" if key[1] else "default tags"
            raise SaveFailed(
                f"{folder}: another engine of this script saves {what} there, and the two would replace each other's checkpoints: "
                "give each engine a save_dir of its own, or a tag (save_checkpoint(save_dir, tag='critic'), and the same for "
                "load_checkpoint)"
            )
        _saved[key] = weakref.ref(engine)


def claim_latest(engine: Any, *, folder: Path) -> None:
    """`engine` is about to write `latest`; says so if it named another engine's checkpoint."""
    key = folder.resolve(), _LATEST
    if _is_anothers(key, engine=engine):
        logger.warning(
            "%s/latest names the checkpoint of the engine that saved last, and another engine of this script saves there, too: give "
            "load_checkpoint a tag, or each engine a save_dir of its own",
            folder,
        )
    _saved[key] = weakref.ref(engine)


def _is_anothers(key: tuple[Path, str | None], *, engine: Any) -> bool:
    other = _saved[key]() if key in _saved else None
    return other is not None and other is not engine and not other.is_closed
