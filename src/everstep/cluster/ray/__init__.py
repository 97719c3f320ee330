"""Processes as Ray actors: a cluster that is started or joined, who runs where, and what outlives a driver."""
