"""Norms of weights."""

from wellnormed.norms.base import Norm as Norm
from wellnormed.norms.convolution import SpectralConv as SpectralConv
from wellnormed.norms.entries import Gain as Gain
from wellnormed.norms.entries import Sign as Sign
from wellnormed.norms.root_mean_square import BiasRMS as BiasRMS
from wellnormed.norms.root_mean_square import ColNorm as ColNorm
from wellnormed.norms.root_mean_square import Euclidean as Euclidean
from wellnormed.norms.root_mean_square import RowNorm as RowNorm
from wellnormed.norms.slices import Experts as Experts
from wellnormed.norms.slices import PerHead as PerHead
from wellnormed.norms.slices import Split as Split
from wellnormed.norms.spectral import Spectral as Spectral
