"""Where others connect: also once there are no file descriptors left for a while."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest
from tests.test_recovery import until

from everstep.recovery.door import Door

FULL = """
import os, resource, socket, threading
from everstep.recovery.door import Door
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []  # a connection that is closed gives a descriptor back, to whoever comes next
def serve(connection):
    held.append(connection)
    connection.sendall(b"served")
door = Door(socket.create_server(("127.0.0.1", 0)), serve, "full")
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(door.address[1], flush=True)  # nobody can be let in now
input()
for fd in kept:
    os.close(fd)
input()
"""


def test_a_process_without_descriptors_lets_others_in_once_it_has_some_again() -> None:
    process = subprocess.Popen([sys.executable, "-c", FULL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout and process.stderr
    try:
        address = ("127.0.0.1", int(process.stdout.readline()))
        with socket.create_connection(address, timeout=10) as first, socket.create_connection(address, timeout=10) as second:
            # The first may still be let in: a thread that waits in accept() has had its descriptor since before.
            assert "Too many open files" in process.stderr.readline(), "it is told"
            process.stdin.write("\n")
            process.stdin.flush()
            assert first.recv(6) == second.recv(6) == b"served"
    finally:
        process.kill()
        process.communicate()


def test_one_that_is_closed_lets_nobody_in_and_ends_its_thread() -> None:
    served: list[socket.socket] = []
    door = Door(socket.create_server(("127.0.0.1", 0)), served.append, "closed")
    with socket.create_connection(door.address, timeout=5):
        assert until(lambda: len(served) == 1, 5.0)
    door.close()
    door.close()
    assert until(lambda: not any(thread.name == "closed-accept" for thread in threading.enumerate()), 5.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.address, timeout=1)
    served[0].close()
