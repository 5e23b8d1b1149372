"""What a plan does not trace."""

from collections.abc import Iterator


def untraced(*, pipeline: int, expert: int, inputs_on_cpu: bool | None) -> Iterator[str]:
    """One line per fault. pipeline, expert: degrees of the topology. inputs_on_cpu: of the recomputation."""
    if pipeline > 1:
        yield f"topology.pipeline={pipeline}: a plan does not trace pipeline stages; use topology.pipeline=1"
    if expert > 1:
        yield f"topology.expert={expert}: a plan does not trace experts, whose rows depend on values; use topology.expert=1"
    if inputs_on_cpu:
        yield "recompute.inputs_on_cpu=true: a plan does not trace inputs in main memory; use recompute.inputs_on_cpu=false"
