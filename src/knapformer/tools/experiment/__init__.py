"""Run a grid of workloads, planners and seeds, and report on it.

    grid       what is run: a TOML or Python file, checked as it is read
    store      its run directory: which cells are done, which failed, which are missing
    loop       runs the missing cells one after the other and records each step
    modelled   engine `simulate`           measured   engine `replay`           trained   engine `torchrun`
    launch     starts torchrun on this machine, or prints a Slurm job that does on its nodes

Restarts, rendezvous and queues are torchrun's and the scheduler's.
"""
