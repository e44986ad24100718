"""Bounds of executed operations, one file per family. Importing this package registers all of them."""

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
