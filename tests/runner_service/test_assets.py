"""Runner.Assets over real gRPC, and the digests that name them."""

import hashlib
import json

import grpc
import pytest

from motet.adapter_template import AdapterTemplate, digest_of_template
from motet.api.v1 import common_pb2, runner_pb2, runner_pb2_grpc, scheduler_pb2
from motet.digest import (
    ADAPTER_OPTIONAL_FILES,
    ASSET_FILES,
    PROCESSOR_TEMPLATE,
    ContentDigest,
    adapter_digest,
    asset_digest,
    asset_files,
    base_digest,
    digest_from_hex,
    digest_of,
    hex_of,
)
from motet.errors import AdapterFetchFailed, ModelFolderError
from motet.transport.over_grpc import is_healthy, open_channel
from motet_runner.adapters.cache import TEMPLATE, DiskCache
from motet_runner.adapters.checks import MAX_UNKEPT_BYTES
from motet_runner.assets import CHUNK_BYTES
from tests.common.waiting import PATIENCE_S, until
from tests.support.in_process_runner import in_process_runner, write_adapter, write_model


async def fetched(address, digest, adapter=""):
    files, done = {}, set()
    async with open_channel(address) as channel:
        async for chunk in runner_pb2_grpc.RunnerStub(channel).Assets(
            runner_pb2.AssetsRequest(digest=digest, adapter=adapter), timeout=PATIENCE_S
        ):
            assert len(chunk.data) <= CHUNK_BYTES
            assert chunk.name not in done
            files[chunk.name] = files.get(chunk.name, b"") + chunk.data
            if chunk.last:
                done.add(chunk.name)
    assert done == set(files)
    return files


async def test_assets_come_whole_in_pieces(folder):
    model = write_model(folder / "model")
    (model / "tokenizer.json").write_text(json.dumps({"text": "x" * (2 * CHUNK_BYTES + 7)}))
    (model / "special_tokens_map.json").write_bytes(b"")
    async with in_process_runner(folder) as runner:
        files = await fetched(runner.address, asset_digest(model))
        assert set(files) == {
            "chat_template.jinja",
            "config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        for name, data in files.items():
            assert data == (model / name).read_bytes()


async def test_a_runner_does_not_serve_a_model_whose_assets_no_gateway_can_use(folder):
    model = write_model(folder / "model")
    (model / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFolderError, match=r"generation_config\.json: temperature must be a number"):
        async with in_process_runner(folder):
            pass


async def test_an_unknown_digest_is_not_found(folder):
    async with in_process_runner(folder) as runner:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(runner.address, "sha256:" + "0" * 64)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "no assets" in caught.value.details()


def adapter_with_template(folder, text):
    """→ The order to check it"""
    write_model(folder / "model")
    adapter = write_adapter(folder / "own")
    (adapter / "chat_template.jinja").write_text(text)
    return scheduler_pb2.EnsureAdapter(
        adapter=common_pb2.AdapterRef(namespace="default", name="own"),
        source=adapter.as_uri(),
        stage=common_pb2.ADAPTER_STAGE_CERTIFIED,
    )


async def test_an_adapters_template_comes_from_a_runner_that_has_checked_it(folder):
    text = "{{ messages }}" + "x" * 2 * CHUNK_BYTES
    order = adapter_with_template(folder, text)
    (folder / "own" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    async with in_process_runner(folder) as runner:
        life = await runner.service.loaded.adapters.ensure(order)
        template = life.certificate.template_digest
        (content,) = (await fetched(runner.address, template, adapter=life.digest)).values()
        assert digest_of_template(content) == template
        assert AdapterTemplate.decode(content).text == text
        assert AdapterTemplate.decode(content).special_tokens["eos_token"] == "<end>"
        kept = life.held.folder / TEMPLATE
        for digest, name in ((template, "sha256:" + "0" * 64), ("sha256:" + "0" * 64, life.digest), (template, "x")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(runner.address, digest, adapter=name)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    kept.unlink()
    async with in_process_runner(folder) as runner:
        again = await runner.service.loaded.adapters.ensure(order)
        assert again.certificate.template_digest == template, "it was checked again"
        assert kept.read_bytes() == content


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
async def test_a_template_that_the_disk_has_lost_is_written_again(folder, damage):
    order = adapter_with_template(folder, "{{ messages }} of its own")
    async with in_process_runner(folder) as runner:
        life = await runner.service.loaded.adapters.ensure(order)
        template, kept = life.certificate.template_digest, life.held.folder / TEMPLATE
        content = kept.read_bytes()
        kept.unlink() if damage == "gone" else kept.write_bytes(content[:-1] if damage == "cut" else b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(runner.address, template, adapter=life.digest)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await until(lambda: life.ready)
        assert kept.read_bytes() == content
        assert await fetched(runner.address, template, adapter=life.digest) == {TEMPLATE: content}


async def test_a_template_that_the_disk_does_not_take_is_sent_from_memory(folder, monkeypatch):
    order = adapter_with_template(folder, "{{ messages }} of its own")
    monkeypatch.setattr(DiskCache, "keep", lambda *_: False)
    async with in_process_runner(folder) as runner:
        life = await runner.service.loaded.adapters.ensure(order)
        (content,) = (await fetched(runner.address, life.certificate.template_digest, adapter=life.digest)).values()
        assert AdapterTemplate.decode(content).text == "{{ messages }} of its own"


async def test_a_runner_is_healthy_once_it_is_loaded(folder):
    async with in_process_runner(folder) as runner:
        assert await is_healthy(runner.address)
    assert not await is_healthy(runner.address)
    assert not (folder / "r0.sock").exists()


def test_a_digest_depends_on_names_sizes_and_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"3")
    whole = digest_of(tmp_path, ["a", "b"])
    assert whole == digest_of(tmp_path, ["b", "a", "b"])
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"23")
    assert digest_of(tmp_path, ["a", "b"]) != whole
    assert digest_of(tmp_path, ["a"]) != digest_of(tmp_path, ["b"])


def test_the_parts_of_a_model_have_their_own_digests(tmp_path):
    model = write_model(tmp_path / "model")
    base, assets = base_digest(model), asset_digest(model)
    (model / "chat_template.jinja").write_text("another")
    assert base_digest(model) == base
    assert asset_digest(model) != assets
    one, two = write_adapter(tmp_path / "a", seed=1), write_adapter(tmp_path / "b", seed=1)
    assert adapter_digest(one) == adapter_digest(two)
    assert adapter_digest(write_adapter(tmp_path / "b", seed=2)) != adapter_digest(one)


def test_the_digest_of_configuration_and_weights_is_stable(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    whole = b"19:adapter_config.json:2:{}" + b"25:adapter_model.safetensors:7:weights"
    assert adapter_digest(tmp_path) == "sha256:" + hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("name", ADAPTER_OPTIONAL_FILES)
def test_an_optional_file_that_comes_changes_or_goes_is_another_digest(tmp_path, name):
    folder = write_adapter(tmp_path / "a")
    without = adapter_digest(folder)
    (folder / name).write_text("{}")
    with_it = adapter_digest(folder)
    (folder / name).write_text("[]")
    changed = adapter_digest(folder)
    assert len({without, with_it, changed}) == 3
    (folder / name).unlink()
    assert adapter_digest(folder) == without


def test_files_that_do_not_change_answers_do_not_change_the_digest(tmp_path):
    folder = write_adapter(tmp_path / "a")
    before = adapter_digest(folder)
    for name in (
        "README.md",
        "Chat_Template.jinja",
        "chat_template.jinja.bak",
        "tokenizer.model",
        "sub/tokenizer.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert adapter_digest(folder) == before


def test_the_files_that_a_gateway_reads_belong_to_an_adapters_digest():
    assert set(ASSET_FILES) - {"config.json", PROCESSOR_TEMPLATE} <= set(ADAPTER_OPTIONAL_FILES)


def test_a_processors_template_counts_for_a_model_that_has_a_processor(tmp_path):
    model = write_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    without = asset_digest(model)
    (model / PROCESSOR_TEMPLATE).write_text('{"chat_template": "x"}')
    assert asset_digest(model) == without, "runners and gateways of the version before agree on it"
    for broken in ("[]", "{", '{"text_config": 1}'):
        (model / "config.json").write_text(broken)
        assert PROCESSOR_TEMPLATE not in asset_files(model)
    (model / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    assert PROCESSOR_TEMPLATE in asset_files(model)


def test_files_are_digested_in_the_order_of_their_names():
    content = ContentDigest()
    content.begin("b", 0)
    with pytest.raises(ValueError, match="order"):
        content.begin("a", 0)


def test_text_that_is_no_digest_is_refused():
    digest = "sha256:" + "0f" * 32
    assert digest_from_hex(hex_of(digest)) == digest
    for wrong in ("", "sha256:", "sha256:../../x", "sha256:" + "G" * 64, "0" * 64):
        with pytest.raises(ValueError, match="not a digest"):
            hex_of(wrong)


async def test_a_long_template_that_the_disk_does_not_take_is_not_kept_in_memory(folder, monkeypatch):
    """Thousands of them would fill it."""
    order = adapter_with_template(folder, "{{ messages }}" + "x" * MAX_UNKEPT_BYTES)
    keep = DiskCache.keep
    monkeypatch.setattr(DiskCache, "keep", lambda *_: False)
    async with in_process_runner(folder) as runner:
        adapters = runner.service.loaded.adapters
        with pytest.raises(AdapterFetchFailed, match="takes no files") as caught:
            await adapters.ensure(order)
        assert caught.value.retry_after > 0
        assert all(life.checked is None for life in adapters.policy)
        monkeypatch.setattr(DiskCache, "keep", keep)
        assert (await adapters.ensure(order)).certificate.template_digest
