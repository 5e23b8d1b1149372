"""Training: the engine (forward, backward, step) and the loop around it."""
