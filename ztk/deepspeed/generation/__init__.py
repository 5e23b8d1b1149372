"""Text generation from an engine's model, with ztk's inference engine or with transformers' loop over gathered weights."""
