"""One file per figure or table: a grid, a run function, a plot. Each is a command, `python -m wellnormed.experiments.NAME`."""
