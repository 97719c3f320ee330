"""A stand-in for vLLM that speaks the part of its interface that everstep uses (vLLM 0.20), and is strict about it.

It generates for real, with a transformers model, so whole runs can be made with it. It fails where vLLM would silently go wrong: tokens
from a prefix cache of former weights, or from memory that sleeps. ``install`` puts it in the place of vLLM in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def install() -> None:
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
