"""DeepSpeed's engine over ztk's: its methods, `p.grad`, saving, moving states, and which engine a parameter belongs to."""
