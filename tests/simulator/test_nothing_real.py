"""Inside a simulation our code gets no real time, chance, thread, process or socket."""

import _thread
import asyncio
import datetime as dt
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import ModuleType

import pytest

from motet import clock
from motet.surroundings import real_surroundings
from motet_simulator.world.nothing_real import RealThingUsed, nothing_real


def of_ours(expression: str, **names):
    """Evaluate it as if it stood in a module of ours."""
    return eval(expression, {"__name__": "motet_scheduler.service", **names})


@pytest.mark.parametrize(
    "expression",
    [
        "time.time()",
        "time.monotonic()",
        "time.perf_counter()",
        "random.uniform(0, 1)",
        "secrets.token_hex(4)",
        "uuid.uuid4()",
        "clock.monotonic()",
        "time.process_time()",
        "time.localtime()",
        "random.gauss(0, 1)",
        "random.Random()",
        "random.SystemRandom()",
        "datetime.datetime.now()",
        "datetime.datetime.today()",
        "datetime.date.today()",
        "os.getpid()",
        "open('/dev/null').close()",
        "Path('/dev/null').read_bytes()",
    ],
)
def test_our_code_gets_no_real_time_and_no_chance(expression):
    names = {"time": time, "random": random, "secrets": secrets, "uuid": uuid, "clock": clock}
    names |= {"datetime": dt, "os": os, "Path": Path}
    with nothing_real(), pytest.raises(RealThingUsed, match="calls"):
        of_ours(expression, **names)
    of_ours(expression, **names)  # and afterwards it may again


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("time", "monotonic", "()"),
        ("random", "uniform", "(0, 1)"),
        ("random", "Random", "()"),
        ("datetime", "datetime", ".now()"),
        ("datetime", "date", ".today()"),
    ],
)
def test_what_a_module_of_ours_has_imported_before_is_refused_too(module, name, call):
    taken = ModuleType("motet_taken")
    sys.modules["motet_taken"] = taken
    try:
        exec(f"from {module} import {name}\ndef ask():\n    return {name}{call}", vars(taken))
        with nothing_real(), pytest.raises(RealThingUsed):
            taken.ask()
        assert taken.ask()
    finally:
        del sys.modules["motet_taken"]


def test_libraries_may_ask_for_the_time():
    with nothing_real():
        assert time.time() > 0
        assert random.random() < 1


def test_the_surroundings_of_a_real_process_are_refused():
    with nothing_real(), pytest.raises(RealThingUsed):
        of_ours("surroundings.real_surroundings()", surroundings=sys.modules["motet.surroundings"])
    real_surroundings()


@pytest.mark.parametrize(
    "begin",
    [
        lambda: threading.Thread(target=print).start(),
        lambda: subprocess.Popen(["true"]),
        lambda: socket.socket(socket.AF_UNIX),
        lambda: asyncio.run(asyncio.to_thread(print)),
        lambda: _thread.start_new_thread(print, ()),
        lambda: os._exit(1) if os.fork() == 0 else None,
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
    ],
    ids=["thread", "process", "socket", "thread of a pool", "bare thread", "fork", "spawn"],
)
def test_nobody_begins_what_no_seed_repeats(begin):
    with nothing_real(), pytest.raises(RealThingUsed):
        begin()


def test_an_event_loop_runs():
    with nothing_real():
        assert asyncio.run(asyncio.sleep(0, "done")) == "done"


def test_dates_and_seeded_chance_are_as_before():
    real = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    with nothing_real():
        made = of_ours("datetime.datetime.fromtimestamp(0, datetime.UTC)", datetime=dt)
        assert isinstance(real, dt.datetime)
        assert isinstance(real, dt.date)
        assert not isinstance(5, dt.datetime)
        assert (real - made).days == 20455
        first = of_ours("random.Random(3).random()", random=random)
    assert isinstance(made, dt.datetime)
    assert first == random.Random(3).random()
    assert type(dt.datetime.now(dt.UTC)) is dt.datetime is type(real)
