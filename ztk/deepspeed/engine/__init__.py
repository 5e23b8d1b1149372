"""DeepSpeed's engine on top of ztk's: its methods, `p.grad`, checkpoints, moving states, and the mapping of parameters to engines."""
