"""The whole local stack with its real processes, for tests that need it.

    async def test_something(tmp_path: Path) -> None:
        with running_stack(tmp_path) as stack:
            client = stack.openai()
            stack.kill("scheduler")
            stack.until(lambda: stack.service("scheduler")["restarts"] == 1)

`down` always runs at the end. The test fails if a process or a socket is left afterwards.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

import motet_cli
from motet.processes.linux import all_stats, environment_of
from motet_cli.status import document_of
from motet_operator.local.state_directory import StateDirectory
from testbed.ports import free_port

REPORTS_AT_ONCE = {"MOTET_RUNNER_REPORT_SECONDS": "0.1"}
"""The settings of a stack whose tests look for the runner that has the streams."""

BUNDLED = Path(motet_cli.__file__).parent / "bundled"
MOTET = (sys.executable, "-P", "-m", "motet_cli.main")


@dataclass
class LocalStack:
    folder: Path
    """The folder of the test, with the state directory in it."""

    manifests: Path | None = None
    """The manifests; None for the bundled ones."""

    runners: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    data_dir: Path | None = None
    """The state directory; None for `data` in the folder."""

    @property
    def data(self) -> Path:
        return self.data_dir or self.folder / "data"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------------------------------------------- commands

    def motet(self, *arguments: str, timeout: float = 180) -> "subprocess.CompletedProcess[str]":
        """Run `motet …` on this stack's state directory."""
        command, *rest = arguments
        return subprocess.run(
            [*MOTET, command, *rest, "--data-dir", str(self.data)],
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def environment(self) -> dict[str, str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
        return outside | {"PYTHONWARNINGS": "default"} | dict(self.env)

    def up_arguments(self) -> list[str]:
        arguments = ["up", "--port", str(self.port)]
        if self.manifests is not None:
            arguments += ["-f", str(self.manifests)]
        if self.runners is not None:
            arguments += ["--runners", str(self.runners)]
        return arguments

    def up(self) -> "subprocess.CompletedProcess[str]":
        return self.motet(*self.up_arguments(), "--detach")

    def down(self) -> "subprocess.CompletedProcess[str]":
        return self.motet("down")

    def status(self) -> dict[str, Any]:
        """What `motet status --json` prints but the figures of metrics, read without starting a process."""
        return document_of(StateDirectory.of(self.data))

    def status_written_ns(self) -> int:
        """When the operator has last written what `status` reads"""
        return StateDirectory.of(self.data).status.stat().st_mtime_ns

    # ------------------------------------------------------------------------------------------------- observations

    def service(self, name: str) -> dict[str, Any]:
        """One service of the status. `runner` is the first runner in the order of names, `runner-1` the second."""
        services = self.status()["services"]
        if name.startswith("runner"):
            runners = sorted((one for one in services if one["kind"] == "runner"), key=lambda one: one["name"])
            return runners[int(name.partition("-")[2] or 0)]  # type: ignore[no-any-return]
        return next(one for one in services if one["name"] == name)

    def sequences(self) -> dict[str, int]:
        """How many sequences each runner had in its last report, by its name."""
        with self.http() as client:
            families = list(text_string_to_metric_families(client.get("/metrics").text))
        samples = [sample for family in families for sample in family.samples]
        return {one.labels["service"]: int(one.value) for one in samples if one.name == "motet_sequences_running"}

    def busiest_runner(self) -> tuple[str, int]:
        """The runner with the most sequences, and how many it has: at least one."""
        self.until(lambda: any(self.sequences().values()))
        return max(self.sequences().items(), key=lambda one: one[1])

    def adapter(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["adapters"] if one["name"] == name)

    def log(self, name: str) -> str:
        return (self.data / "logs" / f"{name}.log").read_text()

    def http(self, **more: Any) -> httpx.Client:
        # Do not load authorities for plain HTTP: that takes longer than a request, and tests send many.
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **more)

    def openai(self, **more: Any) -> openai.OpenAI:
        usual: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "timeout": 60, "max_retries": 0}
        return openai.OpenAI(**(usual | more))

    def ask(self, model: str, question: str, **more: Any) -> str:
        """One short, greedy answer."""
        body = {"max_tokens": 32, "temperature": 0} | more
        with self.openai() as client:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": question}], **body
            )
        return answer.choices[0].message.content or ""

    # -------------------------------------------------------------------------------------------------- failures

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> int:
        """Kill a service with SIGKILL. Returns its pid."""
        pid = int(self.service(name)["pid"])
        os.kill(pid, signum)
        return pid

    @staticmethod
    def engine_of(runner: int) -> int:
        """The runner's child with the engine: another one checks adapters."""
        children = [stat.identity.pid for stat in all_stats() if stat.parent == runner and not stat.dead]
        (engine,) = [pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return engine

    def processes(self) -> list[int]:
        """All living processes of this stack."""
        return [
            stat.identity.pid
            for stat in all_stats()
            if not stat.dead and environment_of(stat.identity.pid).get("MOTET_DATA_DIR") == str(self.data)
        ]

    def sockets(self) -> list[str]:
        """The listening Unix sockets of this stack, and socket files that are left."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        listening = [path for line in lines for path in line.split(maxsplit=7)[7:]]  # a path may contain spaces
        folders = [str(self.data / "run")]
        recorded = self.data / "run" / "sockets"
        if recorded.exists():
            folders.append(recorded.read_text().strip())
        files = [str(path) for folder in folders for path in Path(folder).glob("*.sock")]
        return [path for path in listening if any(path.startswith(folder) for folder in folders)] + files

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        until(condition, seconds, self._in_short)

    def _in_short(self) -> str:
        """The status in one line: more is not seen of a test that fails in a summary."""
        status = self.status()
        told = [
            f"{what} {one['name']}" + ("" if one["ready"] else " not ready")
            for what, of_it in (("process", "services"), ("pool", "pools"), ("adapter", "adapters"))
            for one in status.get(of_it, ())
        ]
        return ", ".join(told)


def until(condition: Callable[[], object], seconds: float = 120, seen: Callable[[], str] = str) -> None:
    """`seen`: what else the message of a wait in vain says."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"the condition did not become true in {seconds:g} s. {seen()}"
        time.sleep(min(0.5, max(0.05, waited / 20)))


@contextmanager
def running_stack(
    folder: Path,
    *,
    manifests: Path | None = None,
    runners: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[LocalStack]:
    """A stack that is up. Afterwards it is taken down, and no process or socket may be left."""
    with taken_down(LocalStack(folder, manifests=manifests, runners=runners, env=env or {})) as stack:
        began = stack.up()
        assert began.returncode == 0, began.stdout + began.stderr + _logs(stack)
        yield stack


@contextmanager
def taken_down(stack: LocalStack) -> Iterator[LocalStack]:
    """The test brings the stack up. Afterwards it is taken down, and no process or socket may be left."""
    try:
        yield stack
    except BaseException:
        print(_logs(stack))
        raise
    finally:
        ended = stack.down()
        left = {pid: _command_of(pid) for pid in stack.processes()}
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not left, f"{left} outlived motet down"
    assert not stack.sockets()


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return "gone since"


def _logs(stack: LocalStack, lines: int = 15) -> str:
    return "\n".join(
        f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        for path in sorted((stack.data / "logs").glob("*.log"))
    )


def copy_of_bundled(folder: Path, *, adapters: Sequence[str] | None = None, engine: str = "") -> Path:
    """Copy the bundled manifests into a folder of the test, with one manifest per adapter."""
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(BUNDLED / "model")
    names = adapters if adapters is not None else sorted(path.name for path in (BUNDLED / "adapters").iterdir())
    pool = {
        "apiVersion": "motet.dev/v1alpha1",
        "kind": "ServingPool",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"uri": "file://model", "servedName": "motet-demo"},
            "engine": {"maxModelLength": 2048, "kvCacheMiB": 64, "dtype": "float32"} | json.loads(engine or "{}"),
            "allowedNamespaces": {"from": "All"},
        },
    }
    (folder / "pool.json").write_text(json.dumps(pool))
    for name in names:
        write_adapter(folder, name, uri=(BUNDLED / "adapters" / name).as_uri())
    return folder


def write_adapter(folder: Path, name: str, *, uri: str, namespace: str = "default", **spec: Any) -> Path:
    manifest = {
        "apiVersion": "motet.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"poolRef": {"name": "demo", "namespace": "default"}, "source": {"uri": uri}} | spec,
    }
    path = folder / f"{name}.json"
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(manifest))
    temporary.rename(path)
    return path
