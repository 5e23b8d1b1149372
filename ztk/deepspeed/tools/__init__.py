"""What scripts import besides: the device, the log, timers, small functions."""
