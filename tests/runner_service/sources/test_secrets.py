"""Credentials: only the fetch process reads them, from the API server or from manifests, and nothing shows them."""

import asyncio
import base64
import os
from pathlib import Path

import pytest
import structlog
from prometheus_client import generate_latest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet_runner.sources import process_pool
from tests.support.source_servers import ErrorStatus, SlowBody, api_server

CANARY = "canary-7f3a9c"


def encoded(**data):
    return {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}


@pytest.fixture
async def api(tmp_path, fetch_setup):
    async with api_server(tmp_path) as server:
        account = server.account(tmp_path / "account")
        host, _, port = server.base.removeprefix("https://").partition(":")
        fetch_setup.settings |= {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
            "service_account": str(account),
        }
        yield server


@pytest.fixture
def closed(web, adapter):
    """A source that accepts only the canary token."""
    web.authorization = f"Bearer {CANARY}"
    return web.put("/pirate/", adapter)


async def test_a_token_from_the_tenants_secret_opens_a_source(api, closed, fetch_setup, adapter):
    api.secrets["tenant-a/key"] = encoded(token=CANARY + "\n")
    api.granted.add("tenant-a/key")
    fetched = await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert fetched.digest == adapter_digest(adapter)
    assert [one.path for one in api.asked] == ["/api/v1/namespaces/tenant-a/secrets/key"]


async def test_a_user_name_and_a_password_from_the_secret_open_a_source(api, web, fetch_setup, adapter):
    web.authorization = "Basic " + base64.b64encode(b"me:geheim").decode()
    api.secrets["tenant-a/key"] = encoded(username="me", password="geheim")
    api.granted.add("tenant-a/key")
    assert (await fetch_setup.fetch(web.put("/pirate/", adapter), credentials="tenant-a/key")).bytes


async def test_a_secret_that_was_not_granted_says_how_to_grant_it(api, closed, fetch_setup):
    with pytest.raises(AdapterFetchFailed) as failed:
        await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"
    assert (
        "kubectl -n tenant-a create role motet-key --verb=get --resource=secrets --resource-name=key; "
        "kubectl -n tenant-a create rolebinding motet-key --role=motet-key --serviceaccount=motet-pools:motet-runner"
    ) in failed.value.message
    assert failed.value.retry_after > 100 * fetch_setup.scale, "looked at again after minutes"


async def test_the_error_names_a_missing_secret(api, closed, fetch_setup):
    api.granted.add("tenant-a/key")
    with pytest.raises(AdapterFetchFailed, match="There is no Secret tenant-a/key") as failed:
        await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"


@pytest.mark.parametrize("data", [encoded(other="x"), encoded(username="me"), {"token": "no base64!"}, {}])
async def test_a_secret_without_the_right_keys_is_named(api, closed, fetch_setup, data):
    api.granted.add("tenant-a/key")
    api.secrets["tenant-a/key"] = data
    with pytest.raises(AdapterFetchFailed, match=r"Secret tenant-a/key has (neither|data)") as failed:
        await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"


async def test_a_token_cannot_smuggle_a_header(api, closed, fetch_setup):
    api.granted.add("tenant-a/key")
    api.secrets["tenant-a/key"] = encoded(token=f"{CANARY}\r\nx-evil: 1")
    with pytest.raises(AdapterFetchFailed, match="characters that are not allowed in an HTTP header"):
        await fetch_setup.fetch(closed, credentials="tenant-a/key")


async def test_an_api_server_in_trouble_is_asked_again_soon(api, closed, fetch_setup):
    api.faults["/api/v1/namespaces/tenant-a/secrets/key"] = ErrorStatus(503)
    api.granted.add("tenant-a/key")
    with pytest.raises(AdapterFetchFailed) as failed:
        await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert failed.value.retry_after > 0


async def test_a_source_that_the_secret_does_not_open_says_so(api, closed, fetch_setup):
    api.granted.add("tenant-a/key")
    api.secrets["tenant-a/key"] = encoded(token="wrong-" + CANARY)
    with pytest.raises(AdapterFetchFailed, match="does not accept the Secret") as failed:
        await fetch_setup.fetch(closed, credentials="tenant-a/key")
    assert failed.value.reason == "CredentialsInvalid"
    assert CANARY not in failed.value.message


async def test_a_source_that_asks_for_credentials_says_where_to_name_them(closed, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match="it needs a Secret") as failed:
        await fetch_setup.fetch(closed)
    assert failed.value.reason == "CredentialsInvalid"


async def test_a_runner_that_cannot_read_secrets_says_so(closed, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match="neither an API server nor manifests"):
        await fetch_setup.fetch(closed, credentials="tenant-a/key")


async def test_local_manifests_hold_secrets_in_both_spellings(closed, fetch_setup, tmp_path, adapter):
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text("released: 2026-02-30\n")  # it costs nobody else's credentials
    (folder / "all.yaml").write_text(
        "apiVersion: v1\nkind: Secret\nmetadata: {name: plain, namespace: tenant-a}\n"
        f"stringData: {{token: {CANARY}}}\n---\n"
        "apiVersion: v1\nkind: Secret\nmetadata: {name: coded, namespace: tenant-a}\n"
        f"data: {{token: {base64.b64encode(CANARY.encode()).decode()}}}\n"
    )
    fetch_setup.settings["manifests"] = str(folder)
    for name in ("plain", "coded"):
        assert (await fetch_setup.fetch(closed, credentials=f"tenant-a/{name}")).digest == adapter_digest(adapter)
    with pytest.raises(AdapterFetchFailed, match="There is no Secret tenant-b/plain") as failed:
        await fetch_setup.fetch(closed, credentials="tenant-b/plain")
    assert failed.value.reason == "CredentialsInvalid"


@pytest.fixture
def not_forked(monkeypatch):
    """The process that users have"""
    monkeypatch.setattr(process_pool, "asyncio", asyncio)


@pytest.mark.usefixtures("not_forked")
async def test_row_37_the_secret_is_in_no_text_no_log_no_metric_no_file_and_not_in_the_service(
    api, web, closed, fetch_setup, capfd
):
    api.granted.add("tenant-a/key")
    api.secrets["tenant-a/key"] = encoded(token=CANARY)
    config = "/pirate/adapter_config.json"
    echo = ErrorStatus(418, headers=(("x-echo", CANARY),), body=CANARY.encode())
    texts = []
    with structlog.testing.capture_logs() as logs:
        for fault in (
            ErrorStatus(401, body=CANARY.encode()),
            echo,
            ErrorStatus(302, headers=(("Location", f"/{CANARY}?{CANARY}"),)),
        ):
            web.faults[config] = fault
            with pytest.raises(AdapterFetchFailed) as failed:
                await fetch_setup.fetch(closed, credentials="tenant-a/key")
            texts += [failed.value.message, repr(failed.value)]
        web.faults[config] = SlowBody()
        fetching = asyncio.create_task(fetch_setup.fetch(closed, credentials="tenant-a/key"))
        while not web.asked_for("adapter_config.json")[3:]:
            await asyncio.sleep(0.01)
        (child,) = _children()
        texts += [_readable(f"/proc/{child}/environ"), _readable(f"/proc/{child}/cmdline")]
        with pytest.raises(AdapterFetchFailed) as failed:
            await fetching
        texts.append(failed.value.message)
    texts += [str(logs), *capfd.readouterr(), generate_latest(fetch_setup.registry).decode()]
    files = [path for path in (fetch_setup.folder / "data").rglob("*") if path.is_file()]
    texts += [path.read_text(errors="replace") for path in files] + [str(path) for path in files]
    assert not [text for text in texts if CANARY in text]
    assert any("the server answers 418" in text for text in texts), "there was something to leak into"


def _children():
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and f"PPid:\t{os.getpid()}\n" in _readable(f"/proc/{entry.name}/status")
        and "-m\0motet_runner.sources.fetch_process" in _readable(f"/proc/{entry.name}/cmdline")
    ]


def _readable(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
