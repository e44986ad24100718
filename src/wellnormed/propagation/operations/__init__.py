"""Functions that bound executed operations, one file for each family. Importing this package registers all of them.

Every function gets a ledger, `step`, to which it adds rows of a proof, and then the arguments of the executed
operation: a `Value` for a tensor that depends on the input, and a `Stored` for one that does not. It returns the value
of the result. Where there is no bound, it raises the `UncertifiableError` of `step.refuse`. A docstring states the
operation and what its bound rests on. A norm is the Euclidean norm where no other is named.
"""

from wellnormed.propagation.operations import activation as activation
from wellnormed.propagation.operations import attention as attention
from wellnormed.propagation.operations import convolution as convolution
from wellnormed.propagation.operations import elementwise as elementwise
from wellnormed.propagation.operations import linear as linear
from wellnormed.propagation.operations import movement as movement
from wellnormed.propagation.operations import normalization as normalization
from wellnormed.propagation.operations import pooling as pooling
from wellnormed.propagation.operations import potential as potential
from wellnormed.propagation.operations import selection as selection
from wellnormed.propagation.operations import source as source
