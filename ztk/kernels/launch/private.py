"""The private names of torch and Triton that the short launch path uses, and the one switch that turns the path off.

[Note: The short launch path]
Torch's dispatcher, Triton's binder and `torch.empty` cost the host 5 to 15 microseconds per op. `direct`, `jit` and `memory` go around them
by functions and attributes that neither project documents, so any release may change them. The path is therefore on for the releases in
`TESTED`. Elsewhere it is off: ops go through torch's dispatcher, kernels are launched by `kernel[grid](...)`, and results come from
`torch.empty`. Both ways start the same programs with the same arguments.

The environment variable `ZTK_LAUNCH` decides otherwise. `public` turns the path off, for instance to rule it out as a cause. `private` turns it
on for releases that were not tested.

Besides the names below the path relies on attributes: in `jit` on `params`, `pre_run_hooks`, `device_caches` and `run` of a JITFunction and on
`run`, `function` and `packed_metadata` of a compiled kernel; in `descriptors` on `TensorDescriptor.__post_init__`, which only checks.
"""

import os
import re
import warnings
from typing import Any

import torch
import triton
from torch.autograd import forward_ad

SWITCH = "ZTK_LAUNCH"
TESTED = {"torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 9))}  # oldest and newest release
VERSIONS = {"torch": torch.__version__, "triton": triton.__version__}
_missing: list[str] = []


def _private(path: str, *, needed: bool = True) -> Any:
    """The object at this dotted path, or None where these releases have none. needed: then the name is noted as missing."""
    package, *parts = path.split(".")
    value: Any = {"torch": torch, "triton": triton}[package]
    for part in parts:
        value = getattr(value, part, None)
    if value is None and needed:
        _missing.append(path)
    return value


dispatch_modes = _private("torch._C._len_torch_dispatch_stack")
function_modes = _private("torch._C._len_torch_function_stack")
transforms = _private("torch._C._are_functorch_transforms_active")
innermost_transform = _private("torch._C._functorch.peek_interpreter_stack")
is_tracing = _private("torch._C._is_tracing")
is_profiled = _private("torch._C._autograd._profiler_enabled")
is_included = _private("torch._C._dispatch_tls_is_dispatch_key_included")
PRE_DISPATCH = _private("torch._C.DispatchKey.PreDispatch")
# The two methods of tensor classes that do not override torch's behaviour.
NO_FUNCTION = _private("torch._C._disabled_torch_function_impl")
NO_DISPATCH = _private("torch._C._disabled_torch_dispatch_impl")
current_gpu = _private("torch._C._cuda_getDevice", needed=False)  # not in torch's builds for CPUs
# (shape, strides, dtype) -> a tensor on the current GPU, by which torch.compile's own code allocates
empty_strided_cuda = _private("torch._C._dynamo.guards._empty_strided_cuda", needed=False)
driver = _private("triton.runtime.driver")
native_specialize_impl = _private("triton.runtime.jit.native_specialize_impl")
if not hasattr(forward_ad, "_current_level"):  # the entered levels of forward-mode differentiation; -1: none
    _missing.append("torch.autograd.forward_ad._current_level")


def is_short(switch: str, *, versions: dict[str, str], missing: list[str]) -> bool:
    """Whether the short path is on. Warns if it is off without `public`.

    switch: the value of `ZTK_LAUNCH`, empty if it is not set. versions: torch's and Triton's. missing: private names that these do not have.

    Raises:
        ValueError: the switch has another value, or is `private` where names are missing.
    """
    if switch not in ("", "public", "private"):
        raise ValueError(f"{SWITCH}={switch} is unknown: set it to public or private, or unset it")
    if switch == "public":
        return False
    found = " and ".join(f"{name} {version}" for name, version in versions.items())
    if switch == "private" and missing:
        raise ValueError(
            f"{SWITCH}=private cannot work: {found} have no {', '.join(missing)}; unset it or set it to public"
        )
    if switch == "private" or (
        not missing and all(_is_tested(name, version=version) for name, version in versions.items())
    ):
        return True
    tested = (f"{name} {'.'.join(map(str, old))} to {'.'.join(map(str, new))}" for name, (old, new) in TESTED.items())
    warnings.warn(
        f"ztk launches kernels by the public functions of {found}, which cost 5 to 15 us more per op: its short launch path was tested with "
        f"{' and '.join(tested)}. Set {SWITCH}=public to confirm this, or {SWITCH}=private to use the short path",
        stacklevel=2,
    )
    return False


def _is_tested(name: str, *, version: str) -> bool:
    oldest, newest = TESTED[name]
    return oldest <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= newest


IS_SHORT = is_short(os.environ.get(SWITCH, ""), versions=VERSIONS, missing=_missing)
