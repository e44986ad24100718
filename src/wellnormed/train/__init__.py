"""Training: config, loop, run folders with exact resume, evaluation, report."""

from typing import TYPE_CHECKING

from wellnormed._lazy import lazy_namespace

if TYPE_CHECKING:
    from wellnormed.train.config import Caps as Caps
    from wellnormed.train.config import TrainConfig as TrainConfig
    from wellnormed.train.evaluate import sample as sample
    from wellnormed.train.loop import resume as resume
    from wellnormed.train.loop import train as train
    from wellnormed.train.presets import PRESETS as PRESETS
    from wellnormed.train.report import write_report as write_report
    from wellnormed.train.run_folder import RunFolder as RunFolder
else:
    __getattr__, __dir__ = lazy_namespace(__name__)
