"""pipeline: what the engine of a `PipelineModule` adds to what the module was built with."""

from ztk.deepspeed.config.keys import Findings, anything, boolean, hint, read_section, takes, whole_number

_BUILT = "stages are cut and seeded when the script builds its PipelineModule, before there is a configuration"
_UNCUT = (
    "activations and gradients cross stages uncut; layers of a PipelineModule are not cut over tensor-parallel ranks"
)
KEYS = {
    "stages": hint(anything, _BUILT, usual=("auto",)),
    "partition": hint(anything, _BUILT, usual=("best",)),
    "seed_layers": hint(boolean, _BUILT, usual=(False,)),
    "activation_checkpoint_interval": takes(whole_number()),
    "pipe_partitioned": hint(boolean, _UNCUT, usual=(True,)),
    "grad_partitioned": hint(boolean, _UNCUT, usual=(True,)),
    "use_reentrant": hint(boolean, "layers are always recomputed without reentrant autograd", usual=(True, False)),
}


def read_pipeline(given: object, *, findings: Findings) -> int:
    """`pipeline.activation_checkpoint_interval`; 0 leaves the module's own."""
    if given is None:
        return 0
    values = read_section(given, path="pipeline.", keys=KEYS, findings=findings)
    return values.get("activation_checkpoint_interval", 0)
