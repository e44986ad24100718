"""Prove a certificate again: NumPy and the standard library only, and nothing of the rest of this library.

`check(document, tensors)` and `check_folder(folder)` believe nothing but that the rows describe the model, and that
computed tensors beside a certificate are what the model computes: every bound is derived again by code of its own, and
every claim on a weight is proved again. `python -m wellnormed.checker FOLDER` prints what was proved.
"""

from wellnormed.checker.check import Report as Report
from wellnormed.checker.check import check as check
from wellnormed.checker.check import check_folder as check_folder
from wellnormed.checker.reading import CheckError as CheckError
