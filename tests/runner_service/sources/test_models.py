"""Base models from hubs and the web: complete before the engine starts, resumed after breaks, or refused."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import structlog
from prometheus_client import generate_latest
from safetensors.numpy import save_file

from motet.digest import base_digest
from motet.errors import ModelFolderError, SetupError
from motet_runner.settings import Settings
from motet_runner.sources.base_model import mark_unverified, model_folder
from motet_runner.sources.source_access import RemoteFiles
from tests.common.waiting import PATIENCE_S
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.in_process_runner import write_model
from tests.support.s3_server import s3_server
from tests.support.source_servers import BrokenConnection, ErrorStatus, SlowBody


@pytest.fixture
def model(tmp_path):
    """A model in three shards."""
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    shards = {f"w{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    for name, shard in shards.items():
        save_file({name: np.full((64, 512), 1.5, np.float32)}, folder / shard)
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps({"metadata": {}, "weight_map": shards}))
    return folder


class Loader:
    def __init__(self, fetch_setup):
        self.fetch_setup = fetch_setup

    async def load(self, uri, **settings):
        self.fetch_setup.settings |= {"model_uri": uri, "pool": "pools/demo"} | settings
        return await model_folder(
            Settings(**self.fetch_setup.settings),
            self.fetch_setup.sources,
            self.fetch_setup.folder / "data/cache/models",
        )


@pytest.fixture
def loader(fetch_setup):
    return Loader(fetch_setup)


async def test_a_model_in_shards_comes_from_a_hub_whole(hub, loader, model):
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    (model / "modeling_evil.py").write_text("import os")
    hub.publish("org/base", model)
    folder = await loader.load("hf://org/base")
    assert base_digest(folder) == base_digest(model)
    assert not (folder / "modeling_evil.py").exists()
    assert not (folder / "pytorch_model.bin").exists()
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()


async def test_a_model_comes_from_a_folder_on_the_web_too(web, loader, model):
    folder = await loader.load(web.put("/base/", model))
    assert base_digest(folder) == base_digest(model)


async def test_a_model_comes_from_a_bucket_and_its_shards_are_continued(store, loader, model):
    (model / "pytorch_model.bin").write_bytes(b"a pickle")
    store.public.add("models")
    uri = store.publish("models", "base", model)
    shard = "/models/base/model-00002-of-00003.safetensors"
    store.faults[shard] = BrokenConnection(after=40_000)
    folder = await loader.load(uri)
    assert base_digest(folder) == base_digest(model)
    assert not (folder / "pytorch_model.bin").exists()
    assert [bool(one.headers.get("range")) for one in store.asked_for(shard)] == [False, True]
    asked = len(store.asked)
    assert await loader.load(uri) == folder
    assert len(store.asked) == asked, "a complete model is not listed again"


async def test_a_model_comes_from_a_registry_whose_tokens_end_while_its_shards_come(registry, loader, model, tmp_path):
    uri = registry.publish("acme/base", "v1", model)
    registry.users["me"], registry.requests_per_token = "geheim", 2
    how = write_secret(loader.fetch_setup, tmp_path, username="me", password="geheim")
    with pytest.raises(ModelFolderError, match=r"in model\.credentialsSecretRef"):
        await loader.load(uri)
    folder = await loader.load(uri, model_credentials=how["credentials"])
    assert base_digest(folder) == base_digest(model)
    asked = len(registry.asked)
    assert await loader.load(uri, model_credentials=how["credentials"]) == folder
    assert len(registry.asked) == asked, "a complete model is not asked for again"
    with pytest.raises(ModelFolderError, match=r"model\.uri: the registry answers 404 for oci://\S+:v2: .*Correct the"):
        await loader.load(uri.replace(":v1", ":v2"), model_credentials=how["credentials"])


async def test_a_bucket_of_the_same_name_in_another_store_is_another_model(store, loader, model, tmp_path):
    store.public.add("models")
    uri = store.publish("models", "base", model)
    first = await loader.load(uri)
    changed = write_model(tmp_path / "changed")
    async with s3_server(tmp_path, "127.0.0.3") as other:
        both = tmp_path / "both.pem"
        both.write_bytes(store.ca_file.read_bytes() + other.ca_file.read_bytes())
        other.public.add("models")
        other.publish("models", "base", changed)
        second = await loader.load(uri, s3_endpoint=other.base, fetch_ca_file=str(both))
        assert base_digest(second) == base_digest(changed)
        assert base_digest(await loader.load(uri, s3_endpoint=store.base)) == base_digest(model)
        (tmp_path / "secrets").mkdir()
        with pytest.raises(ModelFolderError, match="There is no Secret pools/key"):
            await loader.load(uri, model_credentials="pools/key", manifests=str(tmp_path / "secrets"))
    assert base_digest(first) == base_digest(model)


async def test_an_interrupted_fetch_goes_on_only_with_the_same_store(fetch_setup):
    found = set()
    for endpoint in ("https://one.example", "https://two.example"):
        for uri in ("s3://models/base", "hf://org/base"):
            fetch_setup.settings["s3_endpoint"] = endpoint
            async with fetch_setup.sources.partial_folder(RemoteFiles(uri=uri, namespace="a")) as folder:
                found.add(folder)
    assert len(found) == 3


async def test_the_error_of_a_bucket_names_the_fields_of_a_pool(store, loader):
    with pytest.raises(ModelFolderError, match=r"not public\. Name a Secret in model\.credentialsSecretRef"):
        await loader.load("s3://models/base")
    store.public.add("models")
    with pytest.raises(ModelFolderError, match=r"no such bucket\. Correct model\.uri"):
        await loader.load("s3://models/base")


async def test_a_model_without_an_index_is_one_file(web, loader, tmp_path):
    model = write_model(tmp_path / "model")
    assert base_digest(await loader.load(web.put("/base/", model))) == base_digest(model)


async def test_a_revision_of_a_model_is_what_the_pool_names(hub, loader, model, tmp_path):
    hub.publish("org/base", model)
    other = write_model(tmp_path / "other")
    hub.publish("org/base", other, revision="v2")
    assert base_digest(await loader.load("hf://org/base", model_revision="v2")) == base_digest(other)


async def test_a_cached_model_is_not_fetched_again(web, loader, model):
    uri = web.put("/base/", model)
    first = await loader.load(uri)
    asked = len(web.asked)
    assert await loader.load(uri) == first
    assert len(web.asked) == asked


async def test_two_runners_of_one_machine_fetch_a_model_once(web, loader, model):
    uri = web.put("/base/", model)
    folders = await asyncio.gather(loader.load(uri), loader.load(uri))
    assert len(set(folders)) == 1
    assert len(web.wanted("model-00001-of-00003.safetensors")) == 1


async def test_a_model_is_locked_by_a_file_that_is_open_for_writing(web, loader, model, monkeypatch):
    """Network file systems lock no other files, and several machines share a cache."""
    locked = []
    flock = fcntl.flock

    def noted(file, how):
        locked.append(fcntl.fcntl(file, fcntl.F_GETFL))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", noted)
    await loader.load(web.put("/base/", model))
    assert locked
    assert all(flags & os.O_ACCMODE == os.O_RDWR for flags in locked)


async def test_the_second_start_of_a_pool_with_a_cache_downloads_nothing(web, tmp_path, model):
    """Two runners on two machines share only the cache. Each ends once it has the model."""
    (model / "config.json").write_text('{"architectures": ["BartModel"], "is_encoder_decoder": true}')
    uri = web.put("/base/", model)
    cache = tmp_path / "claim"

    async def run(machine):
        environment = os.environ | {
            "MOTET_RUNNER_MODEL_URI": uri,
            "MOTET_RUNNER_MODEL_CACHE": str(cache),
            "MOTET_RUNNER_FETCH_CA_FILE": str(web.ca_file),
            "MOTET_RUNNER_FETCH_ALLOWED_HOSTS": '["127.0.0.1"]',
            "MOTET_RUNNER_LISTEN": f"unix:{tmp_path}/{machine}.sock",
            "MOTET_DATA_DIR": str(tmp_path / machine),
        }
        command = [sys.executable, "-P", "-m", "motet_runner"]
        process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
        return said.splitlines()[-1]

    first = await run("one")
    assert b"BartModel is an encoder-decoder" in first
    asked = len(web.asked)
    assert len(web.wanted("model-00001-of-00003.safetensors")) == 1, first
    assert await run("two") == first
    assert len(web.asked) == asked


async def test_a_broken_download_of_shards_is_continued(web, loader, model):
    uri = web.put("/base/", model)
    for n in (1, 2, 3):
        web.faults[f"/base/model-0000{n}-of-00003.safetensors"] = BrokenConnection(after=30_000, times=2)
    assert base_digest(await loader.load(uri)) == base_digest(model)
    assert web.sent < 1.2 * sum(len(body) for body in web.files.values())


async def test_shards_are_fetched_side_by_side(web, loader, model):
    uri = web.put("/base/", model)
    for n in (1, 2):
        web.faults[f"/base/model-0000{n}-of-00003.safetensors"] = SlowBody(every=0.2)
    loading = asyncio.create_task(loader.load(uri))
    async with asyncio.timeout(PATIENCE_S):
        while not web.asked_for("model-00003-of-00003.safetensors"):
            await asyncio.sleep(0.01)
    assert not loading.done()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_a_model_from_a_very_slow_server_is_given_up(web, loader, model):
    uri = web.put("/base/", model)
    web.faults["/base/model-00001-of-00003.safetensors"] = SlowBody(every=0.2)
    loader.fetch_setup.scale = 0.02  # it is given up again and again, and waits longer each time
    with pytest.raises(ModelFolderError):
        await loader.load(uri)


async def test_the_fetch_of_a_model_is_logged_and_counted(web, loader, model):
    with structlog.testing.capture_logs() as logs:
        await loader.load(web.put("/base/", model))
    assert [line["event"] for line in logs][:1] == ["model_fetch_started"]
    assert logs[-1]["event"] == "model_fetched"
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    lines = dict(
        line.rsplit(" ", 1)
        for line in generate_latest(loader.fetch_setup.registry).decode().splitlines()
        if line[0] != "#"
    )
    assert float(lines["motet_model_fetch_bytes"]) >= size
    assert float(lines['motet_fetch_bytes_total{what="model"}']) >= size


async def test_a_missing_model_ends_the_runner_with_the_reason(hub, loader, model):
    with pytest.raises(ModelFolderError, match=r"the model of pool pools/demo\. There is no repository hf://org/base"):
        await loader.load("hf://org/base")
    assert len(hub.asked) == 1


async def test_a_private_model_names_the_pools_own_field(hub, loader, model):
    hub.publish("org/base", model)
    hub.authorization = "Bearer x"
    with pytest.raises(ModelFolderError, match=r"needs a Secret in model\.credentialsSecretRef") as failed:
        await loader.load("hf://org/base")
    assert failed.value.reason == "CredentialsInvalid"


async def test_a_model_larger_than_it_may_be_is_not_begun(hub, loader, model):
    hub.publish("org/base", model)
    hub.claims["model-00002-of-00003.safetensors"] = 2 << 30
    with pytest.raises(ModelFolderError, match="fetches at most 1073741824") as failed:
        await loader.load("hf://org/base", max_model_gib=1)
    assert failed.value.reason == "TooLarge"
    assert not [one for one in hub.asked_for(".safetensors") if one.method == "GET"]


async def test_a_model_of_another_digest_is_checked_again_after_a_restart(web, loader, model, tmp_path):
    uri = web.put("/base/", model)
    folder = await loader.load(uri)
    asked = len(web.asked)
    mark_unverified(folder)
    changed = write_model(tmp_path / "changed")
    for path in [path for path in web.files if path.startswith("/base/")]:
        del web.files[path]
    web.put("/base/", changed)
    assert base_digest(await loader.load(uri)) == base_digest(changed)
    assert len(web.asked) > asked


CUT_OFF = pytest.mark.parametrize("file", ["model-00002-of-00003.safetensors", "tokenizer.json"])
"""After its fetch, by a machine that failed, for example. A runner that could not load it would end again and again."""


@CUT_OFF
async def test_a_file_from_the_web_that_was_cut_off_is_fetched_again(web, loader, model, file):
    await check_fetched_again(web, loader, web.put("/base/", model), model, file)


@CUT_OFF
async def test_a_file_from_a_hub_that_was_cut_off_is_fetched_again(hub, loader, model, file):
    hub.publish("org/base", model)
    await check_fetched_again(hub, loader, "hf://org/base", model, file)


async def check_fetched_again(server, loader, uri, model, file):
    folder = await loader.load(uri)
    os.truncate(folder / file, (model / file).stat().st_size // 2)
    assert await loader.load(uri) == folder
    assert (folder / file).read_bytes() == (model / file).read_bytes()
    asked = len(server.asked)
    await loader.load(uri)
    assert len(server.asked) == asked


async def test_a_fetch_that_was_interrupted_leaves_no_complete_model(web, loader, model):
    """Although the files that have come are larger than all of the earlier ones."""
    uri, last = web.put("/base/", model), "model-00003-of-00003.safetensors"
    folder = await loader.load(uri)
    os.truncate(folder / last, 10)
    web.files["/base/tokenizer.json"] += b" " * (1 << 18)
    web.faults[f"/base/{last}"] = ErrorStatus(400, times=1)
    with pytest.raises(ModelFolderError):
        await loader.load(uri)
    assert (folder / "tokenizer.json").stat().st_size > 1 << 18
    await loader.load(uri)
    assert (folder / last).read_bytes() == (model / last).read_bytes()


async def test_a_mixture_of_two_models_is_no_complete_one_whatever_its_sizes(web, loader, model):
    uri, last = web.put("/base/", model), "model-00003-of-00003.safetensors"
    folder = await loader.load(uri)
    before = (folder / last).stat()
    os.truncate(folder / last, 10)
    web.files["/base/tokenizer.json"] = b" " * len(web.files["/base/tokenizer.json"])
    web.faults[f"/base/{last}"] = ErrorStatus(400, times=1)
    with pytest.raises(ModelFolderError):
        await loader.load(uri)
    shutil.copy(model / last, folder / last)
    os.utime(folder / last, ns=(before.st_atime_ns, before.st_mtime_ns))
    asked = len(web.asked)
    await loader.load(uri)
    assert len(web.asked) > asked


async def test_bytes_of_other_files_do_not_make_a_model_complete(hub, loader, model):
    hub.publish("org/base", model)
    folder = await loader.load("hf://org/base")
    (folder / "model-00002-of-00003.safetensors").rename(folder / "old.bin")
    await loader.load("hf://org/base")
    assert base_digest(folder) == base_digest(model)


async def test_what_was_away_for_a_while_is_complete_again_without_its_source(hub, loader, model):
    hub.publish("org/base", model)
    folder = await loader.load("hf://org/base")
    file, away = folder / "tokenizer.json", folder.parent / "away"
    file.rename(away)
    hub.commits.clear()
    with pytest.raises(ModelFolderError):
        await loader.load("hf://org/base")
    away.rename(file)
    assert await loader.load("hf://org/base") == folder


async def test_a_mark_that_was_cut_off_says_nothing(web, loader, model):
    uri = web.put("/base/", model)
    folder = await loader.load(uri)
    for mark in (b"", b"{}", b"[1]", b'{"files": {}}', b'{"files": 1}', b'{"bytes": 1}'):
        (folder / ".complete.json").write_bytes(mark)
        asked = len(web.asked)
        await loader.load(uri)
        assert len(web.asked) > asked, mark


async def test_a_model_is_on_the_disk_before_it_counts_as_complete(web, loader, model, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(file):
        path = Path(f"/proc/self/fd/{file}").readlink()
        folder = path if path.is_dir() else path.parent
        assert not (folder / ".complete.json").exists()
        synced.add(path.name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    folder = await loader.load(web.put("/base/", model))
    assert {folder.name, *(path.name for path in folder.iterdir())} - {".complete.json"} == synced


@pytest.mark.parametrize("names", [["../../etc/passwd"], ["/etc/shadow.safetensors"], ["model.bin"], [7], []])
async def test_row_32_an_index_names_only_files_beside_it(web, loader, model, names):
    weights = {f"w{n}": name for n, name in enumerate(names)}
    (model / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": weights}))
    with pytest.raises(ModelFolderError, match=r"names .*, which is no") as failed:
        await loader.load(web.put("/base/", model))
    assert failed.value.reason == "FormatRejected"


async def test_a_server_in_trouble_is_asked_again_a_few_times_and_then_the_runner_ends(web, loader, model):
    uri = web.put("/base/", model)
    web.faults["/base/config.json"] = ErrorStatus(503, times=7)
    assert base_digest(await loader.load(uri)) == base_digest(model)


async def test_the_error_for_an_unknown_scheme_lists_the_known_ones(loader):
    known = "file:// or hf:// or https:// or oci:// or s3://"
    with pytest.raises(ModelFolderError, match=rf"model\.uri: must begin with {known}"):
        await loader.load("ftp://host/base")
    with pytest.raises(ModelFolderError, match=r"model\.uri: oci://host/base must name a registry"):
        await loader.load("oci://host/base")
    with pytest.raises(SetupError, match="MOTET_RUNNER_MODEL_URI is not set"):
        await loader.load("")


async def test_a_runner_without_its_model_ends_with_status_2_and_a_reason(tmp_path, hub):
    environment = os.environ | {
        "MOTET_RUNNER_MODEL_URI": "hf://org/base",
        "MOTET_RUNNER_HUB_ENDPOINT": hub.base,
        "MOTET_RUNNER_FETCH_CA_FILE": str(hub.ca_file),
        "MOTET_RUNNER_LISTEN": f"unix:{tmp_path}/r.sock",
        "MOTET_DATA_DIR": str(tmp_path / "data"),
    }
    command = [sys.executable, "-P", "-m", "motet_runner"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"the model of pool default/default. There is no repository hf://org/base" in said.splitlines()[-1]


async def test_no_child_outlives_its_runner(tmp_path, web, model):
    uri = web.put("/base/", model)
    web.faults["/base/config.json"] = SlowBody(every=0.05)
    environment = os.environ | {
        "MOTET_RUNNER_MODEL_URI": uri,
        "MOTET_RUNNER_FETCH_CA_FILE": str(web.ca_file),
        "MOTET_RUNNER_FETCH_ALLOWED_HOSTS": '["127.0.0.1"]',
        "MOTET_RUNNER_LISTEN": f"unix:{tmp_path}/r.sock",
        "MOTET_DATA_DIR": str(tmp_path / "data"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "motet_runner", env=environment, stderr=subprocess.DEVNULL
    )
    async with asyncio.timeout(PATIENCE_S):
        while not web.asked:
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(PATIENCE_S):
        while web.open:
            await asyncio.sleep(0.05)


async def test_a_model_on_a_volume_may_lie_in_a_hubs_own_layout(loader, model, tmp_path):
    root = tmp_path / "models--org--base"
    (root / "snapshots").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs/main").write_text("c1")
    model.rename(root / "snapshots/c1")
    assert await loader.load(root.as_uri()) == root / "snapshots/c1"
    with pytest.raises(ModelFolderError, match="no snapshot of the revision v2"):
        await loader.load(root.as_uri(), model_revision="v2")
