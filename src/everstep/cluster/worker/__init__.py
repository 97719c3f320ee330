"""What runs in every rank and spare, whoever started it: its state, its step, how it takes and leaves a place in a replica."""
