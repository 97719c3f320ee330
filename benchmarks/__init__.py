"""Measurements of everstep, each a command: ``python -m benchmarks.NAME``, run in the repository."""
