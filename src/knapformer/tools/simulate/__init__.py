"""Predict step time on a cluster one does not have.

Reading order: `presets` (clusters, models, workloads), `work` (what a rank has to do), `step` (in which order),
`program` (as operations), `clock` and `cores` (when each ends), `memory`, `scenario` (all of it), `chrome` (the
timeline as a file), `command`. NumPy only, no torch.
"""
