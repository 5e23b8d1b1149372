"""From a script's first call to an engine: arguments, ranks, mesh, data and `initialize`."""
