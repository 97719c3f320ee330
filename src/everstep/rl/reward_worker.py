"""A process of the reward pool: ``python -m everstep.rl.reward_worker FD PARENT``. Started by :mod:`everstep.rl.reward_pool` only.

It reads tasks from the connection FD and answers them. Of synchronous functions it is given one at a time, so that it can be
killed without loss to others; coroutines run together, each with its time limit here, and the pool's behind it. It ends when
the connection does, and, even if it hangs in C code, with its parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from everstep.cluster.processes import die_with_parent
from everstep.config.rl_schema import RewardConfig


@dataclass(frozen=True)
class Setup:
    """The first message to a worker. It answers with None, or with what is wrong."""

    path: list[str]  # of the importing process: user functions may be found only there
    folder: str
    reward: dict[str, Any]
    source: str
    source_args: dict[str, Any]


@dataclass(frozen=True)
class Task:
    number: int
    term: int  # index into the terms of section ``reward``
    prompt: str
    completion: str
    record: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The value of a task, or why there is none."""

    number: int
    value: float | None
    problem: str = ""


def main(fd: int, parent: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's Ctrl-C the parent takes care
    connection = Connection(fd)
    setup: Setup = connection.recv()
    os.chdir(setup.folder)
    sys.path[:] = setup.path
    from everstep.rl.reward_functions import terms  # after the path is set: it imports user code

    try:
        ours = terms(RewardConfig.model_validate(setup.reward), setup.source, setup.source_args)
    except Exception as error:  # told to the parent, which raises
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    timeout_s = RewardConfig.model_validate(setup.reward).timeout_s
    asyncio.run(_serve(connection, ours, timeout_s))


async def _serve(connection: Connection, ours: list[Any], timeout_s: float) -> None:
    from everstep.rl.reward_functions import call

    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    running: set[asyncio.Task[None]] = set()

    async def answer(task: Task) -> None:
        term = ours[task.term]
        try:
            value = call(term, task.prompt, task.completion, task.record)
            connection.send(Answer(task.number, await (asyncio.wait_for(value, timeout_s) if term.is_async else value)))
        except TimeoutError:
            connection.send(Answer(task.number, None, f"{term.name}: no answer within reward.timeout_s={timeout_s:g} s"))
        except Exception as error:  # a fault boundary: user code
            connection.send(Answer(task.number, None, f"{term.name}: {type(error).__name__}: {error}"))

    def read() -> None:
        try:
            task = connection.recv()
        except EOFError:
            loop.remove_reader(connection.fileno())
            ended.set_result(None)
            return
        running.add(started := loop.create_task(answer(task)))
        started.add_done_callback(running.discard)

    loop.add_reader(connection.fileno(), read)
    await ended


if __name__ == "__main__":
    from everstep.rl import reward_worker  # by its name: what it sends must be the classes that the pool knows

    reward_worker.main(int(sys.argv[1]), int(sys.argv[2]))
