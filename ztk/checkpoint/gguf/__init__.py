"""GGUF files, the format of llama.cpp: converts them to transformers folders, and checkpoints or such folders to them."""
