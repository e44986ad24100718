"""Which parameter of a model gets which norm, and where training starts."""

from wellnormed.routing.assignment import AssignedParameter as AssignedParameter
from wellnormed.routing.assignment import Assignment as Assignment
from wellnormed.routing.assignment import assign_norms as assign_norms
from wellnormed.routing.initialization import initialize_ as initialize_
