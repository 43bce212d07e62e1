"""`motet predict`: shows the versions of the predictor, and orders which one serves."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from motet.clock import monotonic
from motet.errors import NotFound, SetupError
from motet.store import migrate, open_store, predictor_versions
from motet.store.predictor_versions import VersionRecord
from motet.transport.over_grpc import GrpcNetwork
from motet_cli import predict_commands, predict_try
from motet_cli.predict_try import ModelCard
from motet_gateway.features_key import FEATURES_KEY_FILE
from motet_gateway.prompt_features import PromptFeatures
from motet_operator.local.state_directory import StateDirectory
from motet_predictor.learned_requests import LearnedRequests
from motet_predictor.length_model import LengthModel
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_weights import PromptWeights, rows_of
from motet_predictor.service import PredictorService

FIGURES = {
    "answers": 1000,
    "complete": 800,
    "loss": 410.0,
    "covered": [400, 640, 728, 764],
    "decision": "promoted after 500 answers: loss lower by 0.0312 ± 0.0040",
}
RECORDS = [
    VersionRecord(
        version="quantiles-2", role="former", created=datetime(2026, 5, 1, 12, tzinfo=UTC), figures="{damaged"
    ),
    VersionRecord(
        version="prompts-2.7",
        role="serving",
        created=datetime(2026, 5, 2, 12, tzinfo=UTC),
        size=900,
        figures=json.dumps(FIGURES),
    ),
    VersionRecord(
        version="prompts-2.8",
        role="candidate",
        created=datetime(2026, 5, 3, 12, tzinfo=UTC),
        size=900,
        figures=json.dumps(
            FIGURES | {"compared": 200, "prompts": 120, "gain": -0.0123, "error": 0.002, "decision": ""}
        ),
    ),
]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("MOTET_DATABASE_URL", raising=False)
    # In a process of its own the file stays open until the end.
    monkeypatch.setattr("motet_cli.database.log_to", lambda _: None)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def url(data_dir: Path) -> str:
    return f"sqlite+aiosqlite:///{StateDirectory.of(data_dir).data}/motet.db"


@pytest.fixture
def filled(data_dir: Path) -> Path:
    async def fill() -> None:
        await migrate(url(data_dir))
        async with open_store(url(data_dir)) as store:
            for record in RECORDS:
                await predictor_versions.add(store, record)

    asyncio.run(fill())
    return data_dir


def ordered(data_dir: Path) -> str | None:
    async def take() -> VersionRecord | None:
        async with open_store(url(data_dir)) as store:
            found = await predictor_versions.ordered_version(store)
            if found is not None:
                await predictor_versions.end_order(store, found)
            return found

    found = asyncio.run(take())
    return None if found is None else found.version


def test_versions_are_listed_the_newest_first(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_commands.ls(filled, as_json=False) == 0
    head, candidate, serving, former = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["version", "role", "created"]
    assert candidate.startswith("prompts-2.8   candidate   2026-05-03 12:00   1000      0.4100   91.0 %")
    assert candidate.rstrip().endswith("loss lower by -0.0123 ± 0.0020 (200 answers to 120 prompts)")
    assert serving.split()[:2] == ["prompts-2.7", "serving"]
    assert former.split() == ["quantiles-2", "former", "2026-05-01", "12:00", "0", "-", "-", "-"]


def test_json_has_all_figures(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_commands.ls(filled, as_json=True) == 0
    candidate, serving, former = json.loads(capsys.readouterr().out)["versions"]
    assert candidate["against_serving"] == {"answers": 200, "prompts": 120, "gain": -0.0123, "error": 0.002}
    assert serving["coverage"] == {"q50": 0.5, "q80": 0.8, "q90": 0.91, "q95": 0.955}
    assert former["loss"] is None


def test_a_version_is_shown_with_the_reason_why_it_serves(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_commands.show(filled, "prompts-2.7", as_json=False) == 0
    shown = capsys.readouterr().out
    assert "promoted after 500 answers: loss lower by 0.0312 ± 0.0040" in shown
    assert "95.5 %" in shown
    with pytest.raises(NotFound, match="there is no version nothing in this database"):
        predict_commands.show(filled, "nothing", as_json=False)


def test_an_order_waits_for_the_predictor(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_commands.promote(filled, "prompts-2.8") == 0
    assert "prompts-2.8 serves as soon as the predictor has seen this" in capsys.readouterr().err
    predict_commands.ls(filled, as_json=False)
    assert "candidate, will serve" in capsys.readouterr().out
    assert predict_commands.rollback(filled) == 0  # the later order counts
    assert ordered(filled) == "quantiles-2"
    assert ordered(filled) is None


def test_what_cannot_be_ordered_is_refused_with_what_to_do(filled: Path, data_dir: Path) -> None:
    with pytest.raises(SetupError, match="serves already"):
        predict_commands.promote(filled, "prompts-2.7")
    with pytest.raises(NotFound, match="motet predict ls"):
        predict_commands.promote(filled, "prompts-2.9")
    assert ordered(data_dir) is None


def test_an_order_of_a_version_that_was_just_deleted_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_commands, "_versions", lambda _: [replace(RECORDS[2], version="prompts-2.6")])
    with pytest.raises(NotFound, match="motet predict ls"):
        predict_commands.promote(filled, "prompts-2.6")


def test_without_a_database_there_are_no_versions(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_commands.ls(data_dir, as_json=False) == 0
    assert "There are no versions yet" in capsys.readouterr().err
    with pytest.raises(SetupError, match="no version served before"):
        predict_commands.rollback(data_dir)
    assert not list(StateDirectory.of(data_dir).data.glob("*.db"))


def test_an_estimate_is_explained_with_the_words_of_the_prompt(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The predictor is the real one, with weights for which ` poem` means longer answers."""
    layout = StateDirectory.of(data_dir)
    for folder in (layout.data, layout.sockets):
        folder.mkdir(parents=True, exist_ok=True)
    key = layout.data / FEATURES_KEY_FILE
    tokens = {
        "tokens": [5, 6],
        "token_strs": ["A", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}poem"],
        "max_model_len": 1000,
    }
    cards = {
        "/v1/models/bard": {"tenant": "acme", "digest": "sha256:1", "parent": "org/base"},
        "/v1/models/org/base": {"tenant": None, "digest": "sha256:b", "parent": None},
    }
    layout.status.write_text(json.dumps({"url": "http://gateway", "adapters": ADAPTERS}))
    monkeypatch.setattr(predict_try, "_asked", lambda _, path, body=None: tokens if body else cards[path])

    def explained(adapter: str = "bard") -> int:
        asked = {"adapter": adapter, "tenant": "acme", "max_tokens": 0, "temperature": 1.0}
        return predict_try.try_(data_dir, "A poem", as_json=True, **asked)  # type: ignore[arg-type]

    with pytest.raises(SetupError, match="is missing: without the gateway's key"):
        explained()
    key.write_bytes(bytes(32))
    with pytest.raises(SetupError, match="no answer from the predictor"):
        explained()

    made = PromptFeatures(bytes(32))
    names = made.named([5, 6], base="sha256:b")
    (poem,) = [number for number, name in names.items() if (name.kind, name.tokens) == ("token", (6,))]
    weights = PromptWeights.zero(made.space)
    weights.table[rows_of("acme", "acme/poet", np.array([poem], np.uint32))[:1], -8:] = 9.0
    model = PromptModel(LengthModel(), weights)
    for number in range(89):
        model.observe("acme", "acme/poet", 10 + number * 37 % 89 * 10)
    for _ in range(7):
        model.observe("acme", "sha256:b", 10)
    service = PredictorService(model, None, Metrics(CollectorRegistry()), monotonic, LearnedRequests())  # type: ignore[arg-type]

    async def serve_and_ask(adapter: str) -> int:
        async with GrpcNetwork().serving(layout.address("predictor"), service.handlers):
            return await asyncio.to_thread(explained, adapter)

    assert asyncio.run(serve_and_ask("org/base")) == 0
    assert json.loads(capsys.readouterr().out)["answers"] == 7
    monkeypatch.setenv("MOTET_GATEWAY_FEATURES_KEY_FILE", str(key.rename(layout.data / "mounted.key")))
    assert asyncio.run(serve_and_ask("bard")) == 0
    document = json.loads(capsys.readouterr().out)
    (move,) = document["moves"]
    assert move["feature"] == "token ' poem'"
    assert move["factor"] > 1.2
    assert document["answers"] == 89
    assert [step["what"] for step in document["steps"]][2] == "the prompt, too"
    assert document["features_known"]


ADAPTERS = [
    {"namespace": "acme", "name": "other", "model": "acme/bard", "certificate": {"digest": "sha256:2"}},
    {"namespace": "acme", "name": "new", "model": "acme/bard", "certificate": None},
    {"namespace": "acme", "name": "poet", "model": "acme/bard", "certificate": {"digest": "sha256:1"}},
    {"namespace": "else", "name": "theirs", "model": "else/bard", "certificate": {"digest": "sha256:1"}},
]


@pytest.mark.parametrize("said", ["bard", "acme/bard", "pool:bard", "pool:acme/bard"])
def test_an_adapter_is_named_as_the_gateway_does(said: str) -> None:
    """By its object, whose name is not the one in requests; several pools may have that."""
    assert (
        predict_try.full_name(ModelCard(parent="org/base", tenant="acme", digest="sha256:1"), said, ADAPTERS)
        == "acme/poet"
    )
    assert predict_try.full_name(ModelCard(parent="org/base", tenant="acme", digest=None), said, []) == "acme/bard"
