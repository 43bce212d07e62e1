"""Asks one client to do its actions against a product that runs."""

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from testbed.local_stack import LocalStack
from testbed.tree import ROOT
from tools.clients.drivers.protocol import Asked

ADAPTER, CALLER = "pirate", "toolcaller"
QUIET_SECONDS = 10.0
_ENDED = '{"works": false, "why": "the driver ended"}'


def questions(stack: LocalStack, broken: str) -> Asked:
    sys.path.append(str(ROOT / "examples" / "demo"))
    lookups, world = importlib.import_module("lookups"), importlib.import_module("world")
    fact, question = world.fact_of("Brindle", "keeper"), "Who keeps the lighthouse of Brindle?"
    return Asked(
        url=f"{stack.url}/v1",
        broken_url=f"{broken}/v1",
        adapter=ADAPTER,
        caller=CALLER,
        question=question,
        answer=stack.ask(ADAPTER, question),
        tools=[tool.described() for tool in lookups.TOOLS],
        tool=lookups.call_of(fact)["name"],
        result=lookups.told_by_a_tool(fact, random.Random(1)).answer,  # noqa: S311
        tokenizer=str(ROOT / "cli" / "motet_cli" / "bundled" / "model"),
    )


def try_one(command: Sequence[str], actions: Iterable[str], asked: Asked, stack: LocalStack) -> dict[str, str]:
    """Action → why it does not work, or nothing if it does"""
    found = {}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        print(json.dumps(asdict(asked)), file=driver.stdin, flush=True)
        for action in actions:
            print(json.dumps(action), file=driver.stdin, flush=True)
            answer: dict[str, Any] = json.loads(driver.stdout.readline() or _ENDED)
            found[action] = "" if answer["works"] else answer["why"]
            if action == "cancel" and answer["works"]:
                found[action] = left_behind(stack)
        driver.kill()
    return found


def left_behind(stack: LocalStack) -> str:
    """Why a request that its client has left is not over, or nothing"""
    try:
        stack.until(lambda: not any(stack.sequences().values()), QUIET_SECONDS)
    except AssertionError:
        return f"after {QUIET_SECONDS:.0f} s the runner still has {sum(stack.sequences().values())} sequences"
    return ""
