"""The experiments of four papers, one file for each figure or table, with the models and formulas that only they need.

`python -m papers --list` shows them, `python -m papers NAME` runs one. Not in the wheel.
"""
