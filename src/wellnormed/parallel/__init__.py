"""Whole-tensor work on one process or on many."""

from wellnormed.parallel.buckets import in_buckets as in_buckets
from wellnormed.parallel.placement import Job as Job
from wellnormed.parallel.placement import Local as Local
from wellnormed.parallel.placement import Placement as Placement
from wellnormed.parallel.sharded import Dealt as Dealt
from wellnormed.parallel.sharded import placement_for as placement_for
