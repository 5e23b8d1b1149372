"""Answers over HTTP, in OpenAI's interface, and what answers need beside the engine: models from folders, tokenizers, text streams."""
