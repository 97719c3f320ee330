"""The environment variables of a rank: what everstep sets, what the user may add, and how a rank reads them.

Both launchers give every rank

    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT    of its own replica (a replica is its own torch.distributed world)
    EVERSTEP_REPLICA EVERSTEP_EPOCH                       which replica, and the view epoch it was formed in
    OMP_NUM_THREADS                                       1, unless the user says otherwise
    what the configuration's ``env`` says                 for spares too

No torch here: this is read before anything heavy is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everstep.config.schema import Config
from everstep.errors import BadInput, ConfigError

#: Names that everstep, Ray or torchrun sets; a user's value would be overwritten or would break the group.
RESERVED = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    }
)
#: The secret that a lighthouse and its ranks share.
LIGHTHOUSE_TOKEN = "EVERSTEP_LIGHTHOUSE_TOKEN"
RESERVED_PREFIXES = ("EVERSTEP_", "TORCHELASTIC_", "RAY_")


@dataclass(frozen=True)
class RankEnvironment:
    """A rank's place, as its launcher told it. ``rank`` and ``world_size`` count inside the replica."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    replica: int = 0
    epoch: str = "0"

    def variables(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "EVERSTEP_REPLICA": str(self.replica),
            "EVERSTEP_EPOCH": self.epoch,
        }


def check_user_environment(env: Mapping[str, str]) -> None:
    """ConfigError if the configuration's ``env`` sets a name that is not the user's to set, or no valid
    name.
    """
    for name, value in env.items():
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ConfigError(
                f"env.{name} is set by everstep or its launcher for every rank and cannot be set to {value!r}; "
                "remove it (placement is decided by layout.*, the device by device=)"
            )
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"env has {name!r}={value!r}, which is not a valid environment variable")


def worker_environment(config: Config) -> dict[str, str]:
    """What every worker process gets before it has a place, ranks and spares alike. ConfigError on reserved
    names.
    """
    check_user_environment(config.env)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if config.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # else libraries would open contexts on devices that are not ours
    return env | dict(config.env)


def placed(config: Config, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration with what torchft's and torchtitan's variables add to it (launcher local): REPLICA_GROUP_ID is replica.id, if
    that is not given, NGPU the ranks of a replica, which layout.dp makes up for. BadInput if they make no sense or contradict it."""
    given = os.environ if environ is None else environ
    if detect_launcher(config, given) != "local":
        return config
    changes: dict[str, dict[str, int]] = {}
    if (group := given.get("REPLICA_GROUP_ID")) and config.replica.id is None:
        changes["replica"] = {"id": _integer("REPLICA_GROUP_ID", group, least=0)}
    if gpus := given.get("NGPU"):
        sizes = config.layout
        others, ranks = sizes.tp * sizes.cp * sizes.pp, _integer("NGPU", gpus, least=1)
        if ranks != others * sizes.dp:
            if sizes.dp > 1 or ranks % others:
                raise ConfigError(
                    f"NGPU={ranks}, but layout.tp*cp*pp*dp={others * sizes.dp} ranks make up a replica; change one of them"
                )
            changes["layout"] = {"dp": ranks // others}
    if not changes:
        return config
    return config.model_copy(update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()})


@dataclass(frozen=True)
class Machines:
    """The machines of one replica, and which of them this is. ``master_port`` 0: not given."""

    count: int = 1
    index: int = 0
    master_addr: str = ""
    master_port: int = 0


def machines(ranks: int, environ: Mapping[str, str] | None = None) -> Machines:
    """Of a replica of so many ranks.

    From PET_NNODES, PET_NODE_RANK and MASTER_ADDR (MASTER_PORT), as torchrun reads them; else from Slurm's variables of a step: each replica
    has as many of its nodes, one after the other, as its ranks need (SLURM_GPUS_ON_NODE; without GPUs the step is one replica), and the
    first one of these is the master. BadInput.
    """
    given = os.environ if environ is None else environ
    if "PET_NNODES" in given:
        count = _integer("PET_NNODES", given["PET_NNODES"], least=1)
        index = _integer("PET_NODE_RANK", given.get("PET_NODE_RANK", "0"), least=0)
        if index >= count:
            raise BadInput(f"PET_NODE_RANK={index} is not below PET_NNODES={count}")
        if count == 1:
            return Machines()
        if not given.get("MASTER_ADDR"):
            raise BadInput(f"PET_NNODES={count}: a replica over several machines needs MASTER_ADDR, the address of the one with PET_NODE_RANK=0")
        return Machines(count, index, given["MASTER_ADDR"], _port("MASTER_PORT", given))
    nodes = _integer("SLURM_NNODES", given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_NNODES") or "1", least=1)
    if nodes == 1 or "SLURM_NODEID" not in given or ranks == 1:
        return Machines()
    gpus = _integer("SLURM_GPUS_ON_NODE", given.get("SLURM_GPUS_ON_NODE") or "0", least=0)
    count = -(-ranks // gpus) if gpus else nodes
    if count == 1:
        return Machines()
    node = _integer("SLURM_NODEID", given["SLURM_NODEID"])
    hosts = slurm_hosts(given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or "")
    if nodes % count or len(hosts) != nodes or not 0 <= node < nodes:
        raise BadInput(
            f"a replica of {ranks} ranks needs {count} machines, and Slurm's step has {nodes} (SLURM_GPUS_ON_NODE={gpus}, SLURM_NODEID={node}, "
            f"nodes {', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)}); ask for a multiple of {count}, or say which machines with PET_NNODES"
        )
    return Machines(count, node % count, hosts[node - node % count], _port("MASTER_PORT", given))


def slurm_hosts(nodelist: str) -> list[str]:
    """``n[03-05,9]-ib,m1`` -> ``n03-ib n04-ib n05-ib n9-ib m1``. BadInput."""
    if not re.fullmatch(r"(?:[^,\[\]]+(?:\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\][^,\[\]]*)?(?:,(?!$)|$))*", nodelist):
        raise BadInput(f"SLURM_STEP_NODELIST or SLURM_JOB_NODELIST={nodelist!r} is no list of Slurm's like n[03-05,9],m1")
    hosts = []
    for prefix, numbers, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\]([^,]*))?", nodelist):
        for part in numbers.split(",") if numbers else [""]:
            first, _, last = part.partition("-")
            hosts += [f"{prefix}{n:0{len(first)}d}{suffix}" for n in range(int(first), int(last or first) + 1)] if first else [prefix]
    return hosts


def lighthouse_address(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Where the lighthouse is: lighthouse.address, else TORCHFT_LIGHTHOUSE, else torchft's default on this machine."""
    given = os.environ if environ is None else environ
    return config.lighthouse.address or given.get("TORCHFT_LIGHTHOUSE") or "http://127.0.0.1:29510"


def manager_port(environ: Mapping[str, str] | None = None) -> int:
    """Where a replica's torchft manager listens: TORCHFT_MANAGER_PORT; 0, also if it is not set: anywhere. BadInput."""
    return _port("TORCHFT_MANAGER_PORT", os.environ if environ is None else environ)


def read_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """This process's place in its replica. BadInput if a variable is missing or makes no sense: nothing is guessed.

    ``EVERSTEP_REPLICA`` and ``EVERSTEP_EPOCH`` are absent under a plain torchrun, which has one replica:
    number 0.
    """
    given = os.environ if environ is None else environ
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not given.get(name)]
    if missing:
        raise BadInput(
            f"environment variable{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing; start the ranks with "
            "`everstep train CONFIG launcher=local` or `torchrun --nproc_per_node N -m everstep train CONFIG`"
        )
    number = {name: _integer(name, given[name]) for name in needed if name != "MASTER_ADDR"}
    env = RankEnvironment(
        rank=number["RANK"],
        world_size=number["WORLD_SIZE"],
        local_rank=number["LOCAL_RANK"],
        master_addr=given["MASTER_ADDR"],
        master_port=number["MASTER_PORT"],
        replica=_integer("EVERSTEP_REPLICA", given.get("EVERSTEP_REPLICA", "0")),
        epoch=given.get("EVERSTEP_EPOCH", "0"),
    )
    if not 0 <= env.rank < env.world_size:
        raise BadInput(f"RANK={env.rank} is not below WORLD_SIZE={env.world_size}; the launcher's environment is broken")
    if not 0 < env.master_port < 65536:
        raise BadInput(f"MASTER_PORT={env.master_port} is not a port number")
    return env


def inside_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has made this process a rank already."""
    given = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in given or "RANK" in given


def detect_launcher(config: Config, environ: Mapping[str, str] | None = None) -> Literal["ray", "local"]:
    """Resolve ``launcher``: what was asked for; ``auto`` is local inside torchrun, else ray."""
    inside = inside_torchrun(environ)
    if config.launcher == "ray" and inside:
        raise ConfigError(
            "launcher=ray inside torchrun would start one controller per rank; use launcher=local, or start without torchrun"
        )
    if config.launcher == "auto":
        return "local" if inside else "ray"
    return config.launcher


def _port(name: str, environ: Mapping[str, str]) -> int:
    port = _integer(name, environ.get(name) or "0")
    if not 0 <= port < 65536:
        raise BadInput(f"{name}={port} is not a port number")
    return port


def _integer(name: str, text: str, least: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise BadInput(f"environment variable {name}={text!r} is not a whole number") from None
    if least is not None and number < least:
        raise BadInput(f"environment variable {name}={number} must be {least} or more")
    return number
