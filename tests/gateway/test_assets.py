"""The files of base models that a gateway keeps."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.digest import ASSET_FILES, asset_digest, hex_of
from motet.errors import MotetError
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway import assets
from motet_gateway.asset_searches import Owner
from motet_gateway.assets import MODEL_ASSETS, AssetStore
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import GROUP, FakeRunner, FakeServices, assets_digest, fake_services, model_assets
from tests.common.waiting import until

OWNER, NOWHERE = Owner(GROUP), Owner("default/nowhere")


def store_in(folder: Path, changed: Callable[[], None], runners: Sequence[FakeRunner]) -> AssetStore[ModelTokenizer]:
    """`runners`: of the group"""
    return AssetStore(
        folder,
        changed,
        network=GrpcNetwork(),
        kind=MODEL_ASSETS,
        addresses=lambda group: [runner.address for runner in runners] if group == GROUP else [],
    )


async def test_files_that_cannot_be_used_cost_no_memory_with_each_request(tmp_path: Path) -> None:
    digest = asset_digest(tmp_path)
    (tmp_path / hex_of(digest)).mkdir()
    loaded = []
    store = store_in(tmp_path, lambda: loaded.append(True), [])
    store.fetch(digest, NOWHERE)
    await until(lambda: loaded)
    depths = set()
    for _ in range(3):
        with pytest.raises(MotetError) as raised:
            store.get(digest)
        depths.add(len(raised.traceback))
    assert len(depths) == 1


async def test_files_that_could_not_be_used_are_tried_again_later_and_not_with_each_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, say."""
    monkeypatch.setattr(assets, "RETRY_SECONDS", 0.3)
    async with fake_services() as cluster:
        (runner,) = cluster.runners
        loaded: list[bool] = []
        store = store_in(tmp_path, lambda: loaded.append(True), cluster.runners)
        with monkeypatch.context() as full:
            full.setattr(ModelTokenizer, "from_folder", lambda _: (_ for _ in ()).throw(OSError("no space")))
            store.fetch(runner.asset_digest, OWNER)
            await until(lambda: loaded)
            store.fetch(runner.asset_digest, OWNER)
            with pytest.raises(MotetError, match="no space"):
                store.get(runner.asset_digest)
        await asyncio.sleep(0.3)
        assert store.get(runner.asset_digest) is None
        assert len(loaded) == 1
        store.fetch(runner.asset_digest, OWNER)
        await until(lambda: store.get(runner.asset_digest))
        await store.close()


async def test_what_nothing_wants_any_more_is_not_asked_for_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutations: a digest that no runner has is asked for without end; a tokenizer is kept for good."""
    monkeypatch.setattr(assets, "UNWANTED_SECONDS", 0.3)
    async with fake_services() as cluster:
        (runner,) = cluster.runners
        ended: list[bool] = []
        store = store_in(tmp_path, lambda: ended.append(True), cluster.runners)
        store.fetch("sha256:" + "0" * 64, OWNER)
        store.fetch(runner.asset_digest, OWNER)
        await until(lambda: len(ended) == 2)
        store.fetch(runner.asset_digest, NOWHERE)
        store.forget_unwanted()
        assert store.get(runner.asset_digest) is not None
        await asyncio.sleep(0.4)
        store.forget_unwanted()
        assert store.get(runner.asset_digest) is None
        store.fetch(runner.asset_digest, NOWHERE)
        await until(lambda: store.get(runner.asset_digest))
        await store.close()


async def test_files_that_nobody_has_used_for_long_leave_the_disk(tmp_path: Path) -> None:
    """When others come: each revision of an adapter may have files of its own."""
    async with fake_services() as cluster:
        (runner,) = cluster.runners
        loaded: list[bool] = []
        store = store_in(tmp_path, lambda: loaded.append(True), cluster.runners)
        folders = []
        for content, age in (("old", 1e9), ("new", 0.0), ("used", 1e9)):
            (tmp_path / content).mkdir()
            (tmp_path / content / "tokenizer.json").write_text(content)
            digest = asset_digest(tmp_path / content)
            folders.append((tmp_path / content).rename(tmp_path / hex_of(digest)))
            os.utime(folders[-1], (time.time() - age,) * 2)
        _, new, used = folders
        store.fetch(digest, NOWHERE)
        store.fetch(runner.asset_digest, OWNER)
        await until(lambda: loaded[1:])
        assert {*tmp_path.iterdir()} == {new, used, tmp_path / hex_of(runner.asset_digest)}
        assert time.time() - used.stat().st_mtime < 100
        await store.close()


async def test_files_that_are_used_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although they came long ago, and another gateway on this disk removes what nobody uses."""
    async with fake_services() as cluster:
        (runner,) = cluster.runners
        await fetched(cluster, tmp_path)
        kept, other = tmp_path / hex_of(runner.asset_digest), tmp_path / "old"
        for folder in (kept, other):
            folder.mkdir(exist_ok=True)
            os.utime(folder, (0, 0))
        # A fetch that gets nothing removes nothing.
        loaded: list[bool] = []
        another = store_in(tmp_path, lambda: loaded.append(True), cluster.runners)
        monkeypatch.setattr(assets, "UNWANTED_SECONDS", 0.1)
        another.fetch("sha256:" + "0" * 64, NOWHERE)
        await until(lambda: loaded)
        assert kept.exists()
        assert other.exists()
        monkeypatch.setattr(assets, "UNWANTED_SECONDS", 600.0)
        await fetched(cluster, tmp_path)
        another.fetch("sha256:" + "0" * 64, OWNER)
        await until(lambda: not other.exists())
        assert kept.exists()
        await another.close()


async def test_what_a_killed_gateway_has_left_of_a_fetch_is_removed(tmp_path: Path) -> None:
    left, under_way = tmp_path / ".fetching-left", tmp_path / ".fetching-now"
    for folder in (left, under_way):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{")
    os.utime(left, (0, 0))
    async with fake_services() as cluster:
        await fetched(cluster, tmp_path)
    assert not left.exists()
    assert under_way.exists()


async def fetched(cluster: FakeServices, folder: Path) -> AssetStore[ModelTokenizer]:
    loaded = asyncio.Event()
    store = store_in(folder, loaded.set, cluster.runners)
    store.fetch(cluster.runners[-1].asset_digest, OWNER)
    await until(loaded.is_set)
    await store.close()
    return store


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
async def test_files_that_a_power_failure_has_damaged_are_fetched_again(tmp_path: Path, damage: str) -> None:
    """Some of it nobody would notice: without its template, the model would have none."""
    files = model_assets() | {
        "special_tokens_map.json": b"{}",
        "chat_template.json": b'{"chat_template": "another"}',
        "config.json": b'{"max_position_embeddings": 512, "vision_config": {}}',
    }
    assert files.keys() == set(ASSET_FILES)
    digest = assets_digest(files)
    kept = tmp_path / hex_of(digest)
    kept.mkdir()
    for name, content in files.items():
        (kept / name).write_bytes(content)
    match damage:
        case "cut":
            (kept / "tokenizer.json").write_bytes(files["tokenizer.json"][:4096])
        case "empty":
            (kept / "chat_template.jinja").write_bytes(b"")
        case "gone":
            (kept / "generation_config.json").unlink()
    async with fake_services(assets=files) as cluster:
        store = await fetched(cluster, tmp_path)
        model = store.get(digest)
        assert model is not None
        assert model.template is not None
        assert model.template.text == "another"
        assert asset_digest(kept) == digest
        assert [runner.asset_requests for runner in cluster.runners] == [1]
        await fetched(cluster, tmp_path)
        assert [runner.asset_requests for runner in cluster.runners] == [1], "what is whole stays"


async def test_files_that_have_changed_under_a_runner_are_not_taken(tmp_path: Path) -> None:
    async with fake_services(runners=2) as cluster:
        changed, good = cluster.runners
        changed.assets = changed.assets | {"chat_template.jinja": b"something else"}
        store = await fetched(cluster, tmp_path)
        model = store.get(good.asset_digest)
        assert model is not None
        assert model.template is not None
        assert model.template.text.encode() == good.assets["chat_template.jinja"]
        assert [runner.asset_requests for runner in cluster.runners] == [1, 1]


async def test_damaged_files_that_cannot_be_removed_are_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried again until they can be."""
    files = model_assets()
    digest = assets_digest(files)
    kept = tmp_path / hex_of(digest)
    kept.mkdir()
    (kept / "tokenizer.json").write_bytes(files["tokenizer.json"])  # the template is gone
    remove, stays = shutil.rmtree, True

    def rmtree(folder: Path, **how: Any) -> None:
        if not (stays and folder == kept):
            remove(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    async with fake_services(assets=files) as cluster:
        loaded = asyncio.Event()
        store = store_in(tmp_path, loaded.set, cluster.runners)
        store.fetch(digest, OWNER)
        await until(lambda: cluster.runners[0].asset_requests >= 2)
        assert not loaded.is_set()
        stays = False
        await until(loaded.is_set)
        model = store.get(digest)
        assert model is not None
        assert model.template is not None
        await store.close()
