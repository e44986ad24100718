"""Training: config, loop, run folders with exact resume, evaluation, report."""

from wellnormed._lazy import lazy_namespace

__getattr__, __dir__ = lazy_namespace(
    __name__,
    {
        "PRESETS": ".presets",
        "Caps": ".config",
        "RunFolder": ".run_folder",
        "TrainConfig": ".config",
        "resume": ".loop",
        "sample": ".evaluate",
        "train": ".loop",
        "write_report": ".report",
    },
)
