"""Run each rank's share of a step on this device, one after the other."""
