"""What the configurations of all replicas of a run must have alike, when each was started by a command of its own (launcher local)."""

from __future__ import annotations

import json

import xxhash

from everstep.config.schema import Config

_OWN = {"replica", "local", "lighthouse", "ray", "launcher", "resume"}  # sections and keys in which they may differ


def digest_of(config: Config) -> str:
    """Of all that must be alike."""
    return xxhash.xxh3_64_hexdigest(json.dumps(config.model_dump(exclude=_OWN), sort_keys=True).encode())


def differing_keys(one: Config, other: Config) -> list[str]:
    """Sections or keys in which two configurations differ, but for what is each replica's own."""
    mine, theirs = one.model_dump(), other.model_dump()
    found = []
    for name in mine:
        if name in _OWN or mine[name] == theirs[name]:
            continue
        if isinstance(mine[name], dict) and isinstance(theirs[name], dict):
            found += [f"{name}.{key}" for key in mine[name] if mine[name][key] != theirs[name].get(key)]
        else:
            found.append(name)
    return found
