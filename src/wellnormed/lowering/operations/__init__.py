"""Functions that bound executed operations, one file for each family. Importing this package registers all of them.

Every function gets a `ledger`, to which it adds rows of a proof, and then the arguments of the executed operation: a
`Value` for a tensor that depends on the input, and a `Stored` for one that does not. It returns the value of the
result, or raises the `UncertifiableError` of `ledger.refuse` if there is no bound. Docstrings state the operation and
the reason for its bound. Norms are Euclidean unless another one is named.
"""

from wellnormed.lowering.operations import activation as activation
from wellnormed.lowering.operations import attention as attention
from wellnormed.lowering.operations import convolution as convolution
from wellnormed.lowering.operations import elementwise as elementwise
from wellnormed.lowering.operations import linear as linear
from wellnormed.lowering.operations import movement as movement
from wellnormed.lowering.operations import normalization as normalization
from wellnormed.lowering.operations import pooling as pooling
from wellnormed.lowering.operations import scattering as scattering
from wellnormed.lowering.operations import selection as selection
from wellnormed.lowering.operations import source as source
