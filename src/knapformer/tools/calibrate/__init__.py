"""Measure what a layer costs on this device and fit a cost model to it.

Reading order: `subjects` (what is measured), `timing` (how), `packs` (on which sequences), `flops` (what it should
cost), `fitting` (the laws), `run` (all of it); `page`, `command` (how it is shown). The result is a
`knapformer.data.Profile`.
"""
