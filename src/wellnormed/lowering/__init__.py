"""Lowering: the operations of a program become rows of a proof. `walk` goes through the program, `ledger` adds rows.

`operations` bounds single operations; `patterns`, `contractions` and `softmaxes` bound formulas that are written in
several operations. Importing this package registers all of them.
"""

from wellnormed.lowering import operations as operations
