"""Where torch lives: devices, process groups, precision, collectives, RNG, loaders, optimizer and scheduler."""
