"""Peak rates of GPUs by the names that their drivers give: dense products per second, from the makers' data sheets."""

# Words of the name -> (bf16, fp16, fp32), 0 where the GPU has no such products. float32 is computed without TF32. The first match counts.
_PEAKS: dict[tuple[str, ...], tuple[float, float, float]] = {
    ("B200",): (2.25e15, 2.25e15, 8.0e13),
    ("H200",): (9.895e14, 9.895e14, 6.7e13),
    ("GH200",): (9.895e14, 9.895e14, 6.7e13),
    ("H100", "PCIe"): (7.56e14, 7.56e14, 5.1e13),
    ("H100", "NVL"): (8.355e14, 8.355e14, 6.0e13),
    ("H100",): (9.895e14, 9.895e14, 6.7e13),
    ("H800",): (9.895e14, 9.895e14, 6.7e13),
    ("A100",): (3.12e14, 3.12e14, 1.95e13),
    ("A800",): (3.12e14, 3.12e14, 1.95e13),
    ("L40S",): (3.62e14, 3.62e14, 9.16e13),
    ("A40",): (1.497e14, 1.497e14, 3.74e13),
    ("A10",): (1.25e14, 1.25e14, 3.12e13),
    ("RTX", "4090"): (1.652e14, 1.652e14, 8.26e13),
    ("V100",): (0.0, 1.25e14, 1.57e13),
    ("T4",): (0.0, 6.5e13, 8.1e12),
}
_DTYPES = ("bfloat16", "float16", "float32")


def peak_rate(device_name: str, *, dtype: str) -> float | None:
    """Operations per second in `dtype`, such as "bfloat16", of a GPU such as "NVIDIA H100 80GB HBM3". None for a GPU or dtype without an entry,
    and for a part of a GPU (MIG)."""
    words = device_name.replace("-", " ").split()
    if "MIG" in words or dtype not in _DTYPES:
        return None
    for names, rates in _PEAKS.items():
        if set(names) <= set(words):
            return rates[_DTYPES.index(dtype)] or None
    return None
