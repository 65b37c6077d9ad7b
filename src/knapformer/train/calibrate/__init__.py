"""Calibration: measure one layer on this device and fit its costs; the result is a `knapformer.plan.Profile`.

Reading order: `subjects` (what is measured), `timing` (how), `packs` (on which sequences), `flops` (what it should
cost), `run` (all of it). The laws are fitted in `knapformer.plan.fitting`, which needs no torch.
"""

from knapformer.train.calibrate.flops import count_flops
from knapformer.train.calibrate.run import Budget, calibrate
from knapformer.train.calibrate.subjects import Subject, make_subject

__all__ = ["Budget", "Subject", "calibrate", "count_flops", "make_subject"]
