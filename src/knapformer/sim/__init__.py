"""A virtual cluster: what a training step would cost on hardware one does not have. NumPy only, no torch."""
