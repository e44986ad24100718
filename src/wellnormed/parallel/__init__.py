"""Whole-tensor work on one process or on many."""

from wellnormed.parallel.job import Job as Job
from wellnormed.parallel.job import in_buckets as in_buckets
from wellnormed.parallel.placement import Placement as Placement
