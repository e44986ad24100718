"""Norms of weights, and which parameter of a model gets which."""

from wellnormed.norms.assignment import Assignment as Assignment
from wellnormed.norms.assignment import assign_norms as assign_norms
from wellnormed.norms.base import MatrixNorm as MatrixNorm
from wellnormed.norms.base import Norm as Norm
from wellnormed.norms.entrywise import BiasRMS as BiasRMS
from wellnormed.norms.entrywise import ColNorm as ColNorm
from wellnormed.norms.entrywise import Sign as Sign
from wellnormed.norms.spectral import PerHead as PerHead
from wellnormed.norms.spectral import Spectral as Spectral
