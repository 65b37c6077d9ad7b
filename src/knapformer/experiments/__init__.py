"""Experiments: a grid of cells (workload, model, planner, seed), engines that run one cell, and launchers of grids.

    grid       what is run: a TOML or Python file, checked as it is read
    store      its run directory: which cells are done, which failed, which are missing
    loop       runs the missing cells one after the other and records each step
    modelled   engine `simulate`           measured   engine `replay`           trained   engine `torchrun`
    launch     starts torchrun on this machine, or a Slurm job that does on its nodes

Restarts, rendezvous and queues are torchrun's and the scheduler's.
"""

from knapformer.experiments.grid import Cell, Grid, grid_names, read_grid

__all__ = ["Cell", "Grid", "grid_names", "read_grid"]
