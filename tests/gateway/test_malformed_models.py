"""A malformed file of a model is an error that names the file and the field, at once."""

import asyncio
import json
from pathlib import Path

import pytest

from motet.asset_fields import check_asset_files
from motet.digest import asset_digest, hex_of
from motet.errors import Internal, ModelFolderError
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway.asset_searches import Owner
from motet_gateway.assets import MODEL_ASSETS, AssetStore
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import model_assets
from tests.common.waiting import PATIENCE_S

GENERATION, TOKENIZER, PROCESSOR = "generation_config.json", "tokenizer_config.json", "chat_template.json"
MALFORMED = {
    "latin-1": ("chat_template.jinja", b"caf\xe9", r"chat_template\.jinja is not UTF-8: see byte 3"),
    "a template of lists": (
        PROCESSOR,
        b'{"chat_template": []}',
        r"chat_template\.json: chat_template must be text, not \[\]",
    ),
    "a processor's, cut short": (PROCESSOR, b'{"chat', r"chat_template\.json is not valid JSON"),
    "a processor's, latin-1": (PROCESSOR, b"caf\xe9", r"chat_template\.json is not UTF-8: see byte 3"),
    "a list in a list": (GENERATION, b'{"eos_token_id": [[1]]}', r"generation_config\.json: eos_token_id must be"),
    "an id of text": ("config.json", b'{"eos_token_id": "1"}', r"config\.json: eos_token_id must be a token id"),
    "half of a pair": (TOKENIZER, b'{"eos_token": "\\ud800"}', r"tokenizer_config\.json: 'eos_token' holds half"),
    "a word": (GENERATION, b'{"temperature": "hot"}', r"generation_config\.json: temperature must be a number"),
    "not a number": (GENERATION, b'{"top_p": NaN}', r"generation_config\.json: top_p must be a number"),
    "a huge number": (GENERATION, b'{"top_k": 1e999}', r"generation_config\.json: top_k must be an integer"),
    "a huge length": ("config.json", b'{"max_position_embeddings": 1e300}', r"max_position_embeddings must be"),
    "a list": (GENERATION, b"[]", r"generation_config\.json must be a JSON object"),
    "cut short": (GENERATION, b'{"top_k": 1', r"generation_config\.json is not valid JSON"),
    "deep": (GENERATION, b"[" * 100_000, r"generation_config\.json is not valid JSON"),
    "digits": (GENERATION, b'{"top_k": 1' + b"0" * 5000 + b"}", r"generation_config\.json is not valid JSON"),
    "no name": (TOKENIZER, b'{"chat_template": [{"template": "x"}]}', r"chat_template needs a name"),
    "no template": (TOKENIZER, b'{"chat_template": [{"name": "default"}]}', r"chat_template needs a name"),
    "no entry": (TOKENIZER, b'{"chat_template": [1]}', r"chat_template needs a name"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "assets" / "abc"
    made.mkdir(parents=True)
    for name, data in model_assets(template=None).items():
        (made / name).write_bytes(data)
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vision_config": {}}))
    return made


@pytest.mark.parametrize("how", MALFORMED)
def test_a_runner_and_a_gateway_name_the_file_and_the_field(folder: Path, how: str) -> None:
    check_asset_files(folder)
    name, data, said = MALFORMED[how]
    (folder / name).write_bytes(data)
    for read, kind in ((check_asset_files, ModelFolderError), (ModelTokenizer.from_folder, Internal)):
        with pytest.raises(kind, match=said):
            read(folder)


def test_a_tokenizer_that_is_cut_short_is_named(folder: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    for read, kind in ((check_asset_files, ModelFolderError), (ModelTokenizer.from_folder, Internal)):
        with pytest.raises(kind, match=r"tokenizer\.json"):
            read(folder)


def test_whatever_may_be_left_out_may_be_null(folder: Path) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id")
    (folder / GENERATION).write_text(json.dumps(dict.fromkeys(names)))
    (folder / TOKENIZER).write_text(json.dumps({"chat_template": None, "eos_token": None}))
    (folder / PROCESSOR).write_text(json.dumps({"chat_template": None}))
    check_asset_files(folder)
    ModelTokenizer.from_folder(folder)


def breaks(_: Path) -> ModelTokenizer:
    raise KeyError("nobody thought of this")


@pytest.mark.parametrize("how", ["a word", "an error of another kind"])
async def test_requests_for_a_model_that_cannot_be_used_get_an_error_at_once(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how in MALFORMED:
        (folder / MALFORMED[how][0]).write_bytes(MALFORMED[how][1])
    else:
        monkeypatch.setattr(ModelTokenizer, "from_folder", breaks)
    digest = asset_digest(folder)
    folder.rename(folder.parent / hex_of(digest))
    ended = asyncio.Event()
    store = AssetStore(folder.parent, ended.set, network=GrpcNetwork(), kind=MODEL_ASSETS, addresses=lambda _: [])
    store.fetch(digest, Owner("default/nowhere"))
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    with pytest.raises(Internal, match=r"temperature must be|nobody thought of this"):
        store.get(digest)
    await store.close()
