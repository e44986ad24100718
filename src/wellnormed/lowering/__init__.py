"""Lowering: the operations of a program become rows of a proof. `walk` goes through the program, `ledger` adds rows.

`operations` has the bound of every operation, `patterns`, `contractions` and `softmaxes` those of formulas that are
written in several. Importing this room registers all of them.
"""

from wellnormed.lowering import operations as operations
