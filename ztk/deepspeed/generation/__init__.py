"""Texts from a model that an engine holds: by ztk's inference engine, or by transformers' own loop over gathered weights."""
