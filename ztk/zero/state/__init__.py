"""The state of a model in training: saved and loaded, read and changed by name, moved off the device."""
