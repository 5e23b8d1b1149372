"""Compact optimizer states: valid combinations and their requirements.

| optimizer.states | precision.master | stored per parameter, in addition to the 16-bit parameter and its gradient |
| --- | --- | --- |
| fp32 | fp32 | 12 bytes: master weight and two moments in float32 |
| bf16 | fp32 | 8 bytes: master weight in float32, moments in bfloat16 |
| bf16 | stochastic | 4 bytes: moments in bfloat16; the bfloat16 parameter is the master weight, rounded stochastically |
| 8bit | stochastic | 3.125 bytes: 8 more bits of the master weight, moments of 8 bits with a scale per 32 elements |
"""

from collections.abc import Iterator

from ztk.core.policies.precision import MasterWeights

STATES = ("fp32", "bf16", "8bit")


def master_of(states: str, *, master: str | None) -> str:
    """The format of the master weights. `master` if given, else stochastic with 8-bit states, and fp32 otherwise."""
    return master or ("stochastic" if states == "8bit" else "fp32")


def states_faults(states: str, *, name: str) -> Iterator[str]:
    """Yields the faults of the optimizer's `states`. name: the optimizer's name."""
    if states not in STATES:
        yield f"optimizer.states={states}: must be one of {', '.join(STATES)}"
    elif states != "fp32" and name != "adamw":
        yield f"optimizer.states={states} is AdamW's, and this is optimizer={name}: use optimizer=adamw, or optimizer.states=fp32"


def compact_faults(*, name: str, states: str, master: str | None, dtype: str, averages: bool) -> Iterator[str]:
    """name: the optimizer's name. dtype: the parameters', one of fp32, bf16 and fp16. averages: a moving average of the weights is kept."""
    yield from states_faults(states, name=name)
    if master not in (None, *MasterWeights):
        yield f"precision.master={master}: must be one of {', '.join(MasterWeights)}, or null: stochastic with optimizer.states=8bit, else fp32"
        return
    if master == "stochastic" and states == "fp32":
        yield (
            "precision.master=stochastic has no update with optimizer.states=fp32: use optimizer.states=bf16 or optimizer.states=8bit, or "
            "precision.master=fp32"
        )
    if master == "fp32" and states == "8bit":
        yield (
            "precision.master=fp32 has no update with optimizer.states=8bit, which keeps 24 bits of a master weight, rounded "
            "stochastically: use precision.master=stochastic, or optimizer.states=bf16"
        )
    if master_of(states, master=master) == "stochastic":
        option, without = (
            ("optimizer.states=8bit", "optimizer.states=bf16 with precision.master=fp32")
            if states == "8bit"
            else ("precision.master=stochastic", "precision.master=fp32")
        )
        if dtype != "bf16":
            yield (
                f"{option} needs bfloat16 parameters, and precision.dtype is {dtype}: use precision=bf16, or {without}"
            )
        if averages:
            yield (
                f"{option} has no float32 master weights that a moving average could change places with: use ema.decay=null, or "
                f"{without}"
            )
