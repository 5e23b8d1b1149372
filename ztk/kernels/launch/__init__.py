"""From a call of an op to a started kernel: registration with torch, sizes, memory of results, and Triton's compiled programs."""
