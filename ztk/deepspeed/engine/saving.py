"""The engine's methods around checkpoints and full weights. Weights have the dtype that the model computes in."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ztk.deepspeed.saved import checkpoints

if TYPE_CHECKING:
    from ztk.deepspeed.engine.offloading import StateOffload


class Saving:
    """Mixed into the engine. Every rank calls these alike, but for what is said to be local."""

    _states: "StateOffload"

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike,
        tag: str | None = None,
        client_state: dict | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/tag/` (default tag: global_stepN), the tag into `save_dir/latest`, and the script zero_to_fp32.py beside it.

        client_state: plain values and tensors; `load_checkpoint` gives them back. exclude_frozen_parameters: the trained ones alone; whoever
        loads has the others from where they came.
        Raises SaveFailed on all ranks if any fails, ValueError for a client_state that cannot be read back safely.
        """
        self._states.need(what="save_checkpoint")
        checkpoints.save_checkpoint(
            self,
            folder=save_dir,
            tag=tag,
            client_state=client_state or {},
            save_latest=save_latest,
            trained_only=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable | None = None,
    ) -> tuple[str | None, dict]:
        """Sets the engine's state from a checkpoint saved at any stage and number of ranks.

        tag: None reads `load_dir/latest`. Returns (folder, client_state), or (None, {}) if there is no `latest`.
        load_module_strict: False, together with load_module_only or load_optimizer_states=False, loads what model and checkpoint both have;
        with optimizer states they must fit in any case.
        custom_load_fn: called on every rank as custom_load_fn(src=full fp32 weights by name, dst=module) with all parameters unsharded, instead
        of loading the weights by name; rank 0's result counts. Raises ValueError where ranks hold parts of the model.
        Raises CheckpointError on all ranks for a checkpoint that is missing, damaged or of another model.
        """
        self._states.need(what="load_checkpoint")
        return checkpoints.load_checkpoint(
            self,
            folder=load_dir,
            tag=tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states and not load_module_only,
            scheduler_states=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            custom=custom_load_fn,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the model's dtype as one state_dict file.

        False, and nothing written, at stage 3 unless `stage3_gather_16bit_weights_on_model_save` is set.
        """
        self._states.need(what="save_16bit_model")
        return checkpoints.save_16bit_model(
            self, folder=save_dir, filename=save_filename, exclude_frozen=exclude_frozen_parameters
        )

    save_fp16_model = save_16bit_model  # its old name

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The full weights in main memory on rank 0, None on the others; at every stage."""
        return checkpoints.consolidated_state_dict(self, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: dict | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """The module's state_dict; at stage 3, and where ranks hold parts of the model, the full model's in main memory on every rank,
        in full shapes. Otherwise the call is local.

        Raises ValueError for keep_vars where full weights are copies.
        """
        return checkpoints.module_state_dict(
            self,
            destination=destination,
            prefix=prefix,
            keep_vars=keep_vars,
            exclude_frozen=exclude_frozen_parameters,
        )

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Mapping[str, Tensor]],
        strict: bool = True,
        custom_load_fn: Callable | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads `checkpoint["module"]`, weights by name in their full shapes, into the module, master weights included.

        Rank 0's values count.         One module's parameters are unsharded at a time; with custom_load_fn, called as
        custom_load_fn(src=..., dst=module), all of them.
        Where ranks hold parts of the model, each takes its own part of `checkpoint["module"]`, which must hold full weights on every
        rank, and custom_load_fn raises ValueError.
        fetch_z3_params: accepted; sharded parameters are always unsharded for it.
        """
        del fetch_z3_params
        checkpoints.load_module(self, state=checkpoint["module"], strict=strict, custom=custom_load_fn)
