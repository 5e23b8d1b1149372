"""Checkpoints that do not depend on the parallel layout: saved as slices under one layout, loaded under any other."""

from ztk.checkpoint.adapters import read_adapter
from ztk.checkpoint.architecture import adapter_scale, has_adapters, leaves_out_base
from ztk.checkpoint.errors import CheckpointError, DamagedCheckpoint, SaveFailed
from ztk.checkpoint.folder import Retention, checkpoints, resolve
from ztk.checkpoint.full import full_state_dict
from ztk.checkpoint.load import LoadReport, load, load_newest
from ztk.checkpoint.manifest import Manifest, read_manifest
from ztk.checkpoint.save import Saver, SaveReport, save

__all__ = [
    "CheckpointError",
    "DamagedCheckpoint",
    "LoadReport",
    "Manifest",
    "Retention",
    "SaveFailed",
    "SaveReport",
    "Saver",
    "adapter_scale",
    "checkpoints",
    "full_state_dict",
    "has_adapters",
    "leaves_out_base",
    "load",
    "load_newest",
    "read_adapter",
    "read_manifest",
    "resolve",
    "save",
]
