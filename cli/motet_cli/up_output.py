"""The output of `motet up`: which services are ready, the URL, three commands to try, and what happens later."""

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.keys import KEYS_MADE_FILE
from motet_cli.printer import Printer
from motet_cli.readiness import StartupFailed, StartupReady, StartupWatch, ready_of
from motet_operator.local.state_directory import StateDirectory

NEEDS_KEY = (
    "These commands need an API key. Make one: motet key create --tenant default\n"
    "For chat, set MOTET_API_KEY to the key.\n"
    "For curl, write 'authorization: Bearer <key>' to a file and add: --header @FILE"
)


class UpOutput:
    """Prints lines; on a terminal also a spinner."""

    def __init__(self, layout: StateDirectory, url: str, question: str) -> None:
        self._layout = layout
        self._url = url
        self._question = question
        self._printer = Printer(folds_lines=False)
        self._errors = Printer(to_errors=True, folds_lines=False)
        self._began = time.monotonic()
        self._shown: set[str] = set()
        self._kernels: dict[str, dict[str, Any]] = {}
        """What was last said about each runner"""
        self._spinner = self._printer.waiting()

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, text: str) -> None:
        self._printer.line(text)

    def show(self, watch: StartupWatch) -> None:
        for name, record in watch.records.items():
            if record.ready and name not in self._shown:
                self._shown.add(name)
                self._printer.line("  ", ("✓", "green"), f" {name:<24} ready after {self._elapsed:.1f} s")
        waiting = [name for name, record in watch.records.items() if not record.ready]
        if self._spinner is not None:
            self._spinner.update(f"waiting for {', '.join(waiting)}" if waiting else "waiting for the adapters")

    def failed(self, failure: StartupFailed) -> None:
        self.close()
        reason = failure.reason.removeprefix(f"{failure.who}: ")
        self._errors.line(("motet:", "red bold"), f" {failure.who} could not start: {reason}")
        self._errors.line(f"Its log: {failure.log}")

    def ready(self, outcome: StartupReady, *, hint: str) -> None:
        self.close()
        printer = self._printer
        for kind in ("pool", "adapter"):
            for item in outcome.status[f"{kind}s"]:
                ready = ready_of(item)
                idle = ready.get("reason") in ("ScaledToZero", "Suspended")
                if idle or ready.get("status") != "True":
                    state = "is idle" if idle else "is not ready"
                    why = f"{ready.get('reason', '')}: {ready.get('message', '')}"
                    name = f"{item['namespace']}/{item['name']}"
                    printer.line("  ", ("!", "yellow"), f" {kind} {name} {state}: {why}")
        self._show_kernels(outcome.status)
        printer.line("\nMotet is up at ", (self._url, "bold"), f" after {self._elapsed:.1f} s. Try:\n")
        for command in example_commands(self._url, self._layout, outcome.status, self._question):
            self.say(f"  {command}\n")
        if needs_key(self._layout, os.environ):
            self.say(f"{NEEDS_KEY}\n")
        self.say(hint)

    async def follow(self) -> None:
        """Print when a process dies and is restarted, and new problems in the manifests."""
        watch = StartupWatch(self._layout)
        watch.look()
        restarts = {name: record.restarts for name, record in watch.records.items()}
        problems: set[str] = set()
        while True:
            await asyncio.sleep(0.5)
            watch.look()
            for name, record in watch.records.items():
                if record.restarts > restarts.get(name, 0):
                    self.say(f"{time.strftime('%H:%M:%S')} {name} died ({record.reason}) and is started again")
            restarts = {name: record.restarts for name, record in watch.records.items()}
            found = set(watch.status.get("problems", []))
            for problem in sorted(found - problems):
                self.say(f"{time.strftime('%H:%M:%S')} {problem}")
            problems = found
            self._show_kernels(watch.status, time.strftime("%H:%M:%S "))

    def _show_kernels(self, status: dict[str, Any], when: str = "  ") -> None:
        """What each runner computes with, if that is new."""
        for runner in status.get("runners", []):
            name, kernels = runner["name"], runner["kernels"]
            if self._kernels.get(name) != kernels:
                self._kernels[name] = kernels
                note = f" ({kernels['note']})" if kernels["note"] else ""
                self.say(f"{when}{name} computes with {kernels['serving']}{note}")

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def needs_key(layout: StateDirectory, environment: Mapping[str, str]) -> bool:
    """Whether the gateway asks for an API key, judged by the settings in this environment and the state directory."""
    match environment.get("MOTET_GATEWAY_AUTH"):
        case "none":
            return False
        case "keys":
            return True
    return bool(environment.get("MOTET_GATEWAY_KEYS_FILE")) or (layout.data / KEYS_MADE_FILE).exists()


def example_commands(url: str, layout: StateDirectory, status: dict[str, Any], question: str) -> list[str]:
    """Up to three commands: a request, the same request to another model, and the chat."""
    ready = [adapter for adapter in status["adapters"] if adapter["ready"]]
    models = [adapter["model"] for adapter in ready] + [pool["model"] for pool in status["pools"]]
    commands = [_curl(url, model, question) for model in models[:2]]
    return [*commands, f"{program()} chat {models[0]} --data-dir {layout.shell_path}"] if models else commands


def program() -> str:
    """How to call this command again: `motet` if that is this program in PATH, else the path of this call."""
    own = Path(sys.argv[0])
    on_path = shutil.which("motet")
    if own.name != "motet" or (on_path is not None and own.exists() and Path(on_path).samefile(own)):
        return "motet"
    return sys.argv[0]


def _curl(url: str, model: str, question: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]}, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{quoted}'"
