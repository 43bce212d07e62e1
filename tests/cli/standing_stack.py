"""A local stack that only stands there: a process in the place of the operator, and the files of an operator."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from motet.processes import ProcessRecord, ProcessRecords
from motet.processes.linux import boot_id, environment_of, identity_of
from motet_operator.local.manifest_folder import ManifestFolder
from motet_operator.local.state_directory import StateDirectory
from testbed.local_stack import copy_of_bundled, until

DIGEST = "sha256:" + "a" * 64
BASE_DIGEST = "sha256:" + "b" * 64


class StandingStack:
    def __init__(self, layout: StateDirectory, manifests: Path) -> None:
        self.layout = layout
        self.manifests = manifests

    @property
    def data(self) -> Path:
        return self.layout.data

    def reads_manifests(self) -> None:
        """As an operator does: what it accepts stays in use while a file has a problem."""
        folder = ManifestFolder(self.manifests, self.layout.accepted_manifests)
        folder.recall()
        folder.read()

    def says(self, *adapters: dict[str, Any]) -> None:
        """What the operator's status says of adapters from now on."""
        document = {"services": [], "pools": [], "adapters": adapters, "runners": [], "problems": [], "url": "http://x"}
        part = self.layout.status.with_suffix(".part")
        part.write_bytes(orjson.dumps(document))
        part.replace(self.layout.status)


@contextmanager
def standing_stack(
    folder: Path, *, watched: str = "manifests", env: Mapping[str, str] | None = None
) -> Iterator[StandingStack]:
    """`watched`: what `motet up -f` was given, in the folder of the test."""
    layout = StateDirectory.of(folder / "data")
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate"])
    process = subprocess.Popen(
        ["sleep", "600"], env={"MOTET_OPERATOR_MANIFESTS": str(folder / watched)} | dict(env or {})
    )
    try:
        until(lambda: environment_of(process.pid))
        identity = identity_of(process.pid)
        assert identity is not None
        ProcessRecords(layout.operator_records).write(
            ProcessRecord(
                name="operator",
                kind="operator",
                pid=identity.pid,
                start_ticks=identity.start_ticks,
                boot=boot_id(),
                fingerprint="",
                log="",
            )
        )
        stack = StandingStack(layout, manifests)
        stack.says()
        yield stack
    finally:
        process.kill()
        process.wait()


def adapter_entry(
    name: str = "pirate",
    *,
    namespace: str = "default",
    digest: str | None = DIGEST,
    warnings: tuple[str, ...] = (),
    resident: tuple[tuple[str, str], ...] = (),
    **conditions: tuple[str, str, str],
) -> dict[str, Any]:
    """An adapter as the status has it. `conditions` by type: status, reason and message."""
    listed = [
        {"type": kind, "status": status, "reason": reason, "message": message,
         "lastTransitionTime": "2026-01-02T03:04:05Z", "observedGeneration": 1}
        for kind, (status, reason, message) in conditions.items()
    ]  # fmt: skip
    certificate = {
        "digest": digest, "shortDigest": "a" * 12, "sizeBytes": 270445, "rank": 8, "alpha": "16",
        "targetModules": ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"], "format": "peft", "checker": 5,
        "baseDigest": BASE_DIGEST, "provedBy": ["cpp", "torch"], "recordedAnswers": "Agree", "warnings": list(warnings),
    }  # fmt: skip
    return {
        "namespace": namespace,
        "name": name,
        "model": f"{namespace}/{name}",
        "ready": any(one["type"] == "Ready" and one["status"] == "True" for one in listed),
        "conditions": listed,
        "certificate": certificate if digest else None,
        "resident": [{"runner": runner, "tier": tier} for runner, tier in resident],
    }
