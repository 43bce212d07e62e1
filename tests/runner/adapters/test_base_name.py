"""An adapter that names another base model is served with a warning."""

import json
from pathlib import Path

import pytest

from motet.domain import Digest
from motet_runner.adapters.base_name import name_in_hub, other_base
from motet_runner.adapters.certification import EngineLimits


@pytest.mark.parametrize(
    ("model", "uri", "name"),
    [
        ("/cache/sha256-1234", "hf://meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/hub/models--meta-llama--Llama-3.1-8B/snapshots/abc", "", "Llama-3.1-8B"),
        ("/hub/models--google--gemma--2b", "", "gemma--2b"),
        ("/models/Llama-3.1-8B", "", ""),
        ("/models/base", "file:///models/base", ""),
        ("/models/base", "hf://broken", ""),
    ],
)
def test_only_a_hub_names_a_base_model(model: str, uri: str, name: str) -> None:
    assert name_in_hub(Path(model), uri) == name


@pytest.mark.parametrize(
    ("trained_on", "warned"),
    [
        ("meta-llama/Llama-3.1-8B", False),
        ("copies/llama-3.1-8b", False),
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("./merged", False),
        ("/data/merged", False),
        ("outputs/run-1/merged", False),
        ("", False),
        ("owner/" + "x" * 10_000, False),
    ],
)
def test_another_repository_is_warned_about_and_no_folder(trained_on: str, warned: bool) -> None:
    found = other_base(trained_on, "Llama-3.1-8B")
    expected = f"base_model_name_or_path is {trained_on}, and this base model is Llama-3.1-8B"
    assert found == (expected if warned else None)
    assert other_base(trained_on, "") is None


def test_the_process_that_checks_knows_the_name() -> None:
    limits = EngineLimits({}, 8, "float32").with_base(Path("/cache/base"), Digest(""), 100, "hf://owner/base")
    assert EngineLimits.of(json.loads(limits.encode())) == limits
    assert limits.base_name == "base"
