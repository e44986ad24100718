"""The assignment of norms to a model's parameters, and the start of training."""

from wellnormed.routing.assignment import AssignedParameter as AssignedParameter
from wellnormed.routing.assignment import Assignment as Assignment
from wellnormed.routing.assignment import assign_norms as assign_norms
from wellnormed.routing.initialization import initialize_ as initialize_
