"""Why a rank does not move, by its page and by what the kernel says of its process. Pure.

    stuck        sure   on what evidence
    ===========  =====  ========================================================================================================
    process      yes    it is stopped; or no thread of Python has run for a time: the interpreter lock is held, or the kernel has it
    device       yes    an event on a stream of its own has not come back
    collective   no     it has been in one for a long time: the ones it waits for are to be looked at
    device       no     a kernel behind which an event was queued has not ended, and it is in no collective
    process      no     none of these: its main thread has not left its phase (but vote), while all around it is well
    ===========  =====  ========================================================================================================

What is sure is told at once. The others are so as well when a whole run is slow, and which rank is at fault is for the coordinator to find, who
sees its peers; they are told after a longer time, and whenever somebody asks about a rank that is about to be expelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.node.page import ENDS, Reading
from everstep.recovery.progress import BUSY

#: Phases in which a rank that does not move is held up or holds up; in the others it waits for a call.
IN_A_STEP = BUSY | {"begin"}


@dataclass(frozen=True)
class Stuck:
    what: Literal["process", "device", "collective"]
    sure: bool
    why: str
    for_s: float


def surely_stuck(reading: Reading, state: str, waits_in: str, now: float, after_s: float) -> Stuck | None:
    """``state``: the letter of /proc/PID/stat; ``waits_in``: where its main thread is in the kernel ("" if it is not)."""
    silent_s, device = now - reading.tick, reading.device
    if reading.tick and state in "Tt":
        return Stuck("process", True, "its process is stopped (SIGSTOP, or a debugger)", silent_s)
    if reading.tick and silent_s > after_s and reading.where.phase != ENDS:
        where = f"its main thread is in the kernel, in {waits_in}" if state == "D" else "its interpreter lock is held"
        return Stuck("process", True, f"no thread of Python has run for {silent_s:.1f} s: {where}", silent_s)
    if device.asked > device.answered and now - device.asked > after_s:
        return Stuck("device", True, f"its device has not answered for {now - device.asked:.1f} s", now - device.asked)
    return None


def explain(reading: Reading, state: str, waits_in: str, now: float, after_s: float, suspect_s: float) -> Stuck | None:
    """``suspect_s``: after so many seconds in one place it is worth a look; 0: it is known to be stuck, and the question is where."""
    if found := surely_stuck(reading, state, waits_in, now, after_s):
        return found
    at, last, device = reading.where, reading.collective, reading.device
    if at.phase not in IN_A_STEP:
        return None
    if last.open:
        open_s = now - last.started
        return Stuck("collective", False, f"in {last.operation} #{last.count} of {last.group} for {open_s:.1f} s", open_s) if open_s > suspect_s else None
    kernel_s = now - device.queued
    if device.queued > device.caught_up and kernel_s > max(suspect_s, after_s):
        return Stuck("device", False, f"a kernel that it started has not ended for {kernel_s:.1f} s, and it is in no collective", kernel_s)
    if at.phase == "vote" and suspect_s:
        return None  # it waits for the coordinator, which holds a step as long as too few replicas are there
    there_s = now - max(at.since, last.done)
    if there_s > suspect_s:
        return Stuck("process", False, f"its main thread has been in {at.phase} of step {at.step} for {there_s:.1f} s; its threads and its device answer", there_s)
    return None
