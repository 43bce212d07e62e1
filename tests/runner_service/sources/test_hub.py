"""Fetches adapters with the hub's own client, from a fake hub."""

import gzip

import httpx2
import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet_runner.sources.hub_repository import _limit_body
from tests.support.in_process_runner import write_adapter
from tests.support.source_servers import BrokenConnection, EndlessBody, ErrorStatus


def secrets(tmp_path, fetch_setup, **data):
    folder = tmp_path / "manifests"
    folder.mkdir()
    lines = "".join(f"  {key}: {value!r}\n" for key, value in data.items())
    (folder / "key.yaml").write_text(
        f"apiVersion: v1\nkind: Secret\nmetadata: {{name: key, namespace: tenant-a}}\nstringData:\n{lines}"
    )
    fetch_setup.settings["manifests"] = str(folder)


async def test_an_adapter_comes_from_a_hub(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    fetched = await fetch_setup.fetch("hf://org/pirate")
    assert fetched.digest == adapter_digest(adapter)
    assert sorted(path.name for path in fetched.folder.iterdir() if not path.name.startswith(".")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not fetch_setup.partial()


async def test_only_an_adapters_own_files_are_fetched(hub, fetch_setup, adapter):
    (adapter / "adapter_model.bin").write_bytes(b"a pickle")
    (adapter / "README.md").write_text("hello")
    (adapter / "checkpoint-500").mkdir()
    (adapter / "checkpoint-500" / "optimizer.pt").write_bytes(b"another")
    hub.publish("org/pirate", adapter)
    await fetch_setup.fetch("hf://org/pirate")
    names = {one.path.rpartition("/")[2] for one in hub.asked if "/resolve/" in one.path}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


async def test_an_adapters_own_template_and_tokens_come_too(hub, fetch_setup, adapter):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "tokenizer_config.json").write_text("{}")
    hub.publish("org/pirate", adapter)
    fetched = await fetch_setup.fetch("hf://org/pirate")
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)
    assert (fetched.folder / "chat_template.jinja").exists()


async def test_a_file_of_an_earlier_attempt_that_was_removed_since_is_not_used(hub, fetch_setup, adapter):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    first = hub.publish("org/pirate", adapter)
    hub.faults[f"/org/pirate/resolve/{first}/chat_template.jinja"] = BrokenConnection(after=5, times=1000)
    with pytest.raises(AdapterFetchFailed):
        await fetch_setup.fetch("hf://org/pirate")
    assert fetch_setup.partial()
    (adapter / "chat_template.jinja").unlink()
    (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text() + " ")
    hub.publish("org/pirate", adapter)
    assert (await fetch_setup.fetch("hf://org/pirate")).digest == adapter_digest(adapter)


async def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, fetch_setup, adapter, tmp_path):
    hub.publish("org/pirate", adapter)
    other = write_adapter(tmp_path / "other", seed=9)
    commit = hub.publish("org/pirate", other, revision="v2")
    assert (await fetch_setup.fetch("hf://org/pirate")).digest == adapter_digest(adapter)
    for revision in ("v2", commit):
        assert (await fetch_setup.fetch("hf://org/pirate", revision=revision)).digest == adapter_digest(other)


async def test_a_broken_connection_to_a_hub_is_continued(hub, fetch_setup, adapter):
    commit = hub.publish("org/pirate", adapter)
    weights = f"/org/pirate/resolve/{commit}/adapter_model.safetensors"
    hub.faults[weights] = BrokenConnection(after=20_000)
    assert (await fetch_setup.fetch("hf://org/pirate")).digest == adapter_digest(adapter)
    assert [one.method for one in hub.asked_for("safetensors")].count("GET") == 2


async def test_bytes_that_differ_from_the_hubs_listing_are_refused(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    hub.wrong_sum = True
    with pytest.raises(AdapterFetchFailed, match="arrived damaged"):
        await fetch_setup.fetch("hf://org/pirate")
    assert fetch_setup.cached() == []


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_endless_listing_of_a_hub_does_not_fill_the_memory(hub, fetch_setup, adapter, status):
    hub.publish("org/pirate", adapter)
    hub.faults["/api/models/org/pirate/revision/main"] = EndlessBody(status)
    with pytest.raises(AdapterFetchFailed, match="more than 16777216 bytes") as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert failed.value.reason == "TooLarge"
    assert hub.sent < 64 << 20


def test_an_endless_redirect_of_a_hub_does_not_fill_the_memory():
    """The client reads what a redirect sends before it follows it."""
    sent = []

    def body():
        for _ in range(64):
            sent.append(1)
            yield bytes(1 << 20)

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/file":
            return httpx2.Response(200)
        return httpx2.Response(302, headers={"location": "/file"}, content=body())

    client = httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True)
    client.event_hooks = {"response": [_limit_body]}
    with (
        pytest.raises(AdapterFetchFailed, match="more than 16777216 bytes"),
        client.stream("GET", "https://hub.test/org/pirate/resolve/main/adapter_config.json"),
    ):
        pass
    assert len(sent) < 20


async def test_a_compressed_listing_of_a_hub_is_refused(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    packed = gzip.compress(b" " * (64 << 20))
    hub.faults["/api/models/org/pirate/revision/main"] = ErrorStatus(
        200, headers=(("Content-Encoding", "gzip"),), body=packed
    )
    with pytest.raises(AdapterFetchFailed, match="compressed data, although"):
        await fetch_setup.fetch("hf://org/pirate")


async def test_weights_beyond_the_bound_are_refused_by_the_listing(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    with pytest.raises(AdapterFetchFailed, match="fetches at most 1000") as failed:
        await fetch_setup.fetch("hf://org/pirate", max_bytes=1000)
    assert failed.value.reason == "TooLarge"
    assert not [one for one in hub.asked if "/resolve/" in one.path]


async def test_a_repository_with_only_a_pickle_is_refused_with_advice(hub, fetch_setup, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    hub.publish("org/pirate", adapter)
    with pytest.raises(AdapterFetchFailed, match=r"has adapter_model\.bin but no") as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert failed.value.reason == "FormatRejected"


async def test_the_error_says_what_a_hub_does_not_have(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    with pytest.raises(AdapterFetchFailed, match="no repository hf://org/poet"):
        await fetch_setup.fetch("hf://org/poet")
    with pytest.raises(AdapterFetchFailed, match="no revision v9") as failed:
        await fetch_setup.fetch("hf://org/pirate", revision="v9")
    assert failed.value.retry_after > 100 * fetch_setup.scale, "looked for again after minutes"


async def test_a_hub_that_is_in_trouble_is_asked_again_soon(hub, fetch_setup, adapter):
    hub.publish("org/pirate", adapter)
    hub.faults["/api/models/org/pirate/revision/main"] = ErrorStatus(502)
    with pytest.raises(AdapterFetchFailed, match="the hub answers 502") as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert 0 < failed.value.retry_after < 10 * fetch_setup.scale


async def test_an_unreachable_hub_is_asked_again_soon(fetch_setup):
    fetch_setup.settings["hub_endpoint"] = "https://127.0.0.1:1"
    with pytest.raises(AdapterFetchFailed, match="connection refused") as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert 0 < failed.value.retry_after < 10 * fetch_setup.scale


async def test_a_private_repository_opens_with_the_secrets_token(hub, fetch_setup, adapter, tmp_path):
    hub.publish("org/pirate", adapter)
    hub.authorization = "Bearer open-sesame"
    secrets(tmp_path, fetch_setup, token="open-sesame")
    with pytest.raises(AdapterFetchFailed, match=r"needs a Secret in source\.credentialsSecretRef") as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert failed.value.reason == "CredentialsInvalid"
    assert (await fetch_setup.fetch("hf://org/pirate", credentials="tenant-a/key")).digest == adapter_digest(adapter)


async def test_a_gated_repository_says_that_the_secret_does_not_open_it(hub, fetch_setup, adapter, tmp_path):
    hub.publish("org/pirate", adapter)
    hub.authorization, hub.gated = "Bearer another", True
    secrets(tmp_path, fetch_setup, token="open-sesame")
    with pytest.raises(AdapterFetchFailed, match="does not accept the Secret") as failed:
        await fetch_setup.fetch("hf://org/pirate", credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"
    assert "sesame" not in failed.value.message


async def test_a_hub_takes_a_token_and_no_password(hub, fetch_setup, adapter, tmp_path):
    hub.publish("org/pirate", adapter)
    secrets(tmp_path, fetch_setup, username="me", password="geheim")
    with pytest.raises(AdapterFetchFailed, match="must have the key token") as failed:
        await fetch_setup.fetch("hf://org/pirate", credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"


async def test_row_33_a_redirect_of_a_hub_to_a_private_address_is_not_followed(hub, fetch_setup, adapter):
    commit = hub.publish("org/pirate", adapter)
    path = f"/org/pirate/resolve/{commit}/adapter_config.json"
    told = {"Location": "https://10.0.0.1/adapter_config.json", "X-Repo-Commit": commit, "X-Linked-Etag": '"1"'}
    hub.faults[path] = ErrorStatus(302, headers=(*told.items(), ("X-Linked-Size", "10")))
    with pytest.raises(AdapterFetchFailed) as failed:
        await fetch_setup.fetch("hf://org/pirate")
    assert "10.0.0.1" in failed.value.message
