"""Checkpoints on disk: what a rank saves, how a folder becomes complete at one instant, and which one to resume from.

    RUN/checkpoints/latest                        the name of the newest complete checkpoint
    RUN/checkpoints/step-000120/manifest.json     step, layout, size and xxh3-128 of every other file
    RUN/checkpoints/step-000120/run.json          the recipe's state
    RUN/checkpoints/step-000120/state/            one safetensors and one json file per rank of a replica
    RUN/checkpoints/step-000120/hf/               the model as transformers loads it

A save is written into ``step-000120.partial`` and renamed when it is complete: a folder without that suffix
is always whole, unless the disk damaged it later, which the manifest reveals.
"""
