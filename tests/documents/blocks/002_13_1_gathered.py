# Accessing parameters directly under ZeRO-3
from deepspeed import zero

with zero.GatheredParameters(model.parameters()):
    # Full parameters available only within this block
    weight_norm = model.weight.norm()
