"""Work that needs whole tensors, shared among processes."""

from wellnormed.parallel.placement import Job as Job
from wellnormed.parallel.placement import Placement as Placement
