import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from motet_cli import adapter_upload
from motet_cli.upload import exchange
from testbed.local_stack import BUNDLED

PIRATE, MODEL = BUNDLED / "adapters" / "pirate", BUNDLED / "model"


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def source(self) -> dict[str, str]:
        """Of the manifest, which is all that was printed for a pipe."""
        return yaml.safe_load(self.out)["spec"]["source"]


Upload = Callable[..., Said]


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own accounts and proxies, and no long pauses."""
    for name in [one for one in os.environ if one.startswith(("AWS_", "MOTET_")) or one.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(exchange, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process


@pytest.fixture
def upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Upload:
    def run(folder: Path, to: str, **more: Any) -> Said:
        asked = {"name": "desk", "namespace": "acme", "model": str(MODEL), "pool": "motet-pools/demo"}
        rest = {"secret": None, "as_json": False}
        status = adapter_upload.upload(tmp_path / "data", folder, to=to, **{**asked, **rest, **more})
        return Said(status, *capsys.readouterr())

    return run


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the base model were elsewhere: what is sent is not checked first, which takes a second each time."""
    monkeypatch.setattr(adapter_upload, "limits_for", lambda _: None)


@pytest.fixture
def docker_login(tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    def write(config: dict[str, Any]) -> None:
        (tmp_path / "docker").mkdir(exist_ok=True)
        (tmp_path / "docker" / "config.json").write_text(json.dumps(config))

    return write
