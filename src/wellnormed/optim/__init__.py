"""One optimizer engine, and the published optimizers as compositions of momentum, norm and step rule."""

from wellnormed.optim import directions as directions
from wellnormed.optim.averaged import Averaged as Averaged
from wellnormed.optim.clipped import Clipped as Clipped
from wellnormed.optim.conditional_gradient import ConditionalGradient as ConditionalGradient
from wellnormed.optim.fallback import AdamWSettings as AdamWSettings
from wellnormed.optim.modular_descent import ModularDescent as ModularDescent
from wellnormed.optim.named import Almond as Almond
from wellnormed.optim.named import Muon as Muon
from wellnormed.optim.named import Scion as Scion
from wellnormed.optim.named import SpectralDescent as SpectralDescent
from wellnormed.optim.parts import Direction as Direction
from wellnormed.optim.parts import DirectionInput as DirectionInput
from wellnormed.optim.scalars import scalars as scalars
from wellnormed.optim.uniform import NormalizedSGD as NormalizedSGD
from wellnormed.optim.uniform import Signum as Signum
from wellnormed.optim.validation import NonFiniteGradientError as NonFiniteGradientError
