"""Code that several ops share: tiles and device functions of kernels, helpers on CPUs, and the description of an op."""
