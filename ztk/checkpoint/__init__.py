"""Checkpoints that belong to the model: saved by slices under one layout, loaded under any other."""

from ztk.checkpoint.errors import CheckpointError, SaveFailed
from ztk.checkpoint.folder import Retention, checkpoints, newest_whole, resolve
from ztk.checkpoint.load import LoadReport, load
from ztk.checkpoint.manifest import Manifest, read_manifest
from ztk.checkpoint.save import Saver, SaveReport, save

__all__ = [
    "CheckpointError",
    "LoadReport",
    "Manifest",
    "Retention",
    "SaveFailed",
    "SaveReport",
    "Saver",
    "checkpoints",
    "load",
    "newest_whole",
    "read_manifest",
    "resolve",
    "save",
]
