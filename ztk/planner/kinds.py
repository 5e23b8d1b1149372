"""Kinds of operations of a plan. Operations of ztk's own kernels are called by their names."""

PRODUCT, ATTENTION, TORCH_ATTENTION, ELEMENTWISE = "product", "attention", "torch_attention", "elementwise"
GROUPED_PRODUCT = "grouped_product"  # torch's product of groups of rows, each with a matrix of its own
FUSED = "fused"  # an operation of ztk that was not measured itself
INDEXED = "indexed"  # rows selected by indices or a mask
GRADIENT, REQUEST, INTERCEPTED = "gradient", "request", "intercepted"  # work of the host that is not an operation
