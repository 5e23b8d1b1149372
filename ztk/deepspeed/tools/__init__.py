"""Other imports of scripts: the device, the log, timers, small functions."""
