"""Text generation from an engine's model, with transformers' loop over gathered weights."""
