"""What a `motet up` says of processes that an earlier one has left."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from motet.processes import ProcessRecord, ProcessRecords, identity_of
from motet.processes.linux import boot_id
from motet_cli.readiness import StartupFailed, StartupWatch, read_records
from motet_operator.local.state_directory import StateDirectory


@pytest.mark.parametrize(("failures", "exit_status"), [(3, 1), (1, 2)])
def test_a_failure_of_before_the_start_is_none_of_the_start(failures: int, exit_status: int, tmp_path: Path) -> None:
    layout = StateDirectory.of(tmp_path)
    layout.prepare()
    own = identity_of(os.getpid())
    assert own is not None
    failing = ProcessRecord(
        name="demo-1", kind="runner", pid=own.pid, start_ticks=0, boot=boot_id(), fingerprint="", log="",
        failures=failures, exit_status=exit_status, reason="no such model",
    )  # fmt: skip
    records = ProcessRecords(layout.service_records)
    records.write(failing)
    watch = StartupWatch(layout, fingerprint="of the new operator", earlier=read_records(layout))
    assert watch.look() is None
    records.write(failing := replace(failing, failures=failures + 1, restarts=1))
    assert watch.look() is None, "the operator from before is still there"

    operator = ProcessRecord(
        name="operator", kind="operator", pid=own.pid, start_ticks=own.start_ticks, boot=boot_id(),
        fingerprint="of the new operator", log="",
    )  # fmt: skip
    ProcessRecords(layout.operator_records).write(operator)
    layout.status.write_text(json.dumps({"operator": own.pid, "services": []}))
    assert watch.look() is None
    records.write(replace(failing, failures=failures + 2, restarts=2))
    assert isinstance(watch.look(), StartupFailed)
