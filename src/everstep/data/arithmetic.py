"""Tiny supervised data: sums and products of small numbers, as chats and as lines of text. Used by the examples of SFT."""

from __future__ import annotations

from everstep.errors import BadInput


def chats(largest: int = 9) -> list[dict[str, list[dict[str, str]]]]:
    """Records {messages}: the user asks "7+5", the assistant says "12", for all pairs of numbers up to ``largest``."""
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in _pairs(largest)
    ]


def product_chats(largest: int = 9) -> list[dict[str, list[dict[str, str]]]]:
    """As ``chats``, with products: the user asks "7*5", the assistant says "35"."""
    return [
        {"messages": [{"role": "user", "content": f"{a}*{b}"}, {"role": "assistant", "content": str(a * b)}]}
        for a, b in _pairs(largest)
    ]


def texts(largest: int = 9) -> list[dict[str, str]]:
    """Records {text}: "7+5=12", for all pairs of numbers up to ``largest``."""
    return [{"text": f"{a}+{b}={a + b}"} for a, b in _pairs(largest)]


def _pairs(largest: int) -> list[tuple[int, int]]:
    if largest < 1:
        raise BadInput(f"largest={largest} must be at least 1")
    return [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
