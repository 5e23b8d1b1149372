"""An HTTP server with OpenAI's interface, and its parts outside the engine: models from folders, tokenizers, text streams."""
