"""Models as GGUF files, which llama.cpp reads: into a folder as transformers has it, and out of a checkpoint or such a folder."""
