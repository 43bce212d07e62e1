"""`motet up` in this process, as far as what it starts."""

import os
from pathlib import Path
from typing import Any

import pytest

from motet_cli import up as module
from motet_cli.up import Options, up


def test_up_does_not_pass_the_users_key_to_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    async def in_front(*_: Any, **__: Any) -> int:
        seen.append(dict(os.environ))
        return 0

    monkeypatch.setattr(module, "_run_in_foreground", in_front)
    monkeypatch.setattr(module, "log_to", lambda _: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["MOTET_API_KEY"] = "motet_0123456789abcdef_of-a-person"
    options = Options(data_dir=tmp_path, manifests=None, port=0, runners=None, detach=False, wait_seconds=1)
    assert up(options) == 0
    (inherited,) = seen
    assert inherited["MOTET_DATA_DIR"] == str(tmp_path)
    assert "MOTET_API_KEY" not in inherited
