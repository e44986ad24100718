"""Whole-tensor work on one process or on many."""

from wellnormed.parallel.placement import Job as Job
from wellnormed.parallel.placement import Placement as Placement
