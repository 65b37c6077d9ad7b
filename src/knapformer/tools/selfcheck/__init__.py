"""Compare balanced with unbalanced outputs and gradients, of one's own model on this machine."""
