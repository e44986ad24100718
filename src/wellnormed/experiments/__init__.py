"""One file per figure or table: a grid, a run function, a plot. `python -m wellnormed.experiments.NAME` runs it."""
