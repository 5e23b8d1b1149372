"""The columns of `metrics.jsonl` and keys of `summary.json` that ztk writes in every run. Values of the user's need other names."""

COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "tokens", "tokens_per_second"),
    *("tokens_per_second_per_gpu", "step_seconds", "mfu", "hfu", "slowest_rank", "slowest_ratio"),
    *("status", "error", "steps", "first_loss", "final_loss", "step_seconds_median", "loss_digest"),  # of the summary
    *("parameters", "world_size"),
)
PREFIXES = ("memory.", "peak_memory.", "comm.", "io.", "seconds.", "kernel.")


def column_fault(name: object, *, more: tuple[str, ...] = (), prefixes: tuple[str, ...] = ()) -> str:
    """Returns why a value of the user's cannot have this name in a row, or "" if it can.

    more, prefixes: names and beginnings of the task's own columns.
    """
    if not isinstance(name, str) or not name:
        return f"{name!r} is no name: use a text"
    if name in COLUMNS + more or name.startswith(PREFIXES + prefixes):
        return f"{name!r} is a column of ztk's: use another name, such as 'my_{name.replace('.', '_')}'"
    return ""
