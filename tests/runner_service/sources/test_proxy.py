"""A proxy gives no permissions: the runner checks the target's address, and asks the proxy for that address."""

import base64
import socket

import pytest
from pydantic import ValidationError

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet_runner.settings import Settings
from motet_runner.sources.network_guard import NetworkGuard
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.s3_server import s3_server
from tests.support.source_servers import ErrorStatus, hub_server, proxy_server, web_server


@pytest.fixture
async def proxy(fetch_setup):
    async with proxy_server() as server:
        fetch_setup.settings["fetch_proxy"] = server.url
        yield server


@pytest.fixture
async def inside(tmp_path, fetch_setup):
    """A server at an address that is not allowed."""
    async with web_server(tmp_path) as server:
        fetch_setup.settings["fetch_ca_file"] = str(server.ca_file)
        yield server


async def test_an_address_that_is_refused_directly_is_refused_through_a_proxy(inside, proxy, fetch_setup, adapter):
    source = inside.put("/pirate/", adapter)
    for uri in (source, source.replace("127.0.0.1", "localhost")):
        with pytest.raises(AdapterFetchFailed, match="not a public address"):
            await fetch_setup.fetch(uri)
    assert (proxy.asked, inside.asked) == ([], [])


async def test_the_proxys_own_machine_is_refused_as_a_source(inside, proxy, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match="not a public address"):
        await fetch_setup.fetch(f"https://127.0.0.1:{proxy.port}/a/")
    assert proxy.asked == []


async def test_a_redirect_to_a_private_address_is_not_followed_through_a_proxy(
    web, proxy, fetch_setup, adapter, tmp_path
):
    source = web.put("/pirate/", adapter)
    async with web_server(tmp_path, "127.0.0.2") as hidden:
        hidden.put("/pirate/", adapter)
        told = ("Location", hidden.url("/pirate/adapter_config.json"))
        web.faults["/pirate/adapter_config.json"] = ErrorStatus(302, headers=(told,))
        with pytest.raises(AdapterFetchFailed, match=r"127\.0\.0\.2, which is not a public address"):
            await fetch_setup.fetch(source)
        assert hidden.asked == []
    assert {end.rpartition(":")[0] for end in proxy.asked} == {"127.0.0.1"}


async def test_the_proxy_is_asked_for_the_checked_address_and_not_for_the_name(web, proxy, fetch_setup, adapter):
    """Also if the proxy resolves the name to another address."""
    proxy.names["localhost"] = "127.0.0.3"
    source = web.put("/pirate/", adapter).replace("127.0.0.1", "localhost")
    fetched = await fetch_setup.fetch(source)
    assert fetched.digest == adapter_digest(adapter)
    port = web.base.rpartition(":")[2]
    assert {end for end in proxy.asked if end.startswith("127.")} == {f"127.0.0.1:{port}"}
    assert "localhost" not in " ".join(proxy.asked + proxy.headers)


async def test_a_proxy_with_its_own_guard_gets_names_if_the_platform_says_so(inside, proxy, fetch_setup, adapter):
    fetch_setup.settings["fetch_proxy_guards"] = True
    source = inside.put("/pirate/", adapter).replace("127.0.0.1", "localhost")
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    assert {end.partition(":")[0] for end in proxy.asked} == {"localhost"}


async def test_a_hub_is_reached_through_the_proxy(tmp_path, proxy, fetch_setup, adapter):
    async with hub_server(tmp_path) as hub:
        fetch_setup.settings |= {"fetch_ca_file": str(hub.ca_file), "hub_endpoint": hub.base}
        hub.publish("org/pirate", adapter)
        assert (await fetch_setup.fetch("hf://org/pirate")).digest == adapter_digest(adapter)
        with pytest.raises(AdapterFetchFailed, match="not a public address"):
            await fetch_setup.fetch(hub.url("/org/pirate/"))  # the hub's setting counts only for URIs of the hub
    assert len(set(proxy.asked)) == 1


async def test_an_object_store_is_reached_through_the_proxy(tmp_path, proxy, fetch_setup, adapter):
    async with s3_server(tmp_path) as store:
        fetch_setup.settings |= {"fetch_ca_file": str(store.ca_file), "s3_endpoint": store.base}
        store.public.add("models")
        assert (await fetch_setup.fetch(store.publish("models", "a", adapter))).digest == adapter_digest(adapter)
        with pytest.raises(AdapterFetchFailed, match="not a public address"):
            await fetch_setup.fetch(store.url("/models/a/"))  # the store's setting counts only for s3:// URIs
    assert len(set(proxy.asked)) == 1


async def test_a_registry_and_its_realm_are_reached_through_the_proxy(tmp_path, proxy, registry, fetch_setup, adapter):
    registry.users["me"] = "geheim"
    source = registry.publish("acme/pirate", "v1", adapter)
    how = write_secret(fetch_setup, tmp_path, username="me", password="geheim")
    assert (await fetch_setup.fetch(source, **how)).digest == adapter_digest(adapter)
    assert set(proxy.asked) == {registry.host}
    registry.realm = "https://10.1.2.3/token"
    with pytest.raises(AdapterFetchFailed, match=r"leads to 10\.1\.2\.3, which is not a public address"):
        await fetch_setup.fetch(source, manifest="b", **how)
    assert set(proxy.asked) == {registry.host}


async def test_the_proxys_own_name_and_password_reach_the_proxy_alone(web, proxy, fetch_setup, adapter):
    fetch_setup.settings["fetch_proxy"] = proxy.url.replace("http://", "http://me:geheim%21@")
    await fetch_setup.fetch(web.put("/pirate/", adapter))
    wanted = "Proxy-Authorization: Basic " + base64.b64encode(b"me:geheim!").decode()
    assert all(wanted in headers for headers in proxy.headers)
    assert not any("proxy-authorization" in one.headers for one in web.asked)


@pytest.mark.parametrize("answer", ["403 Forbidden", "407 Proxy Authentication Required", "banana"])
async def test_the_error_shows_the_answer_of_a_proxy_that_refuses(web, proxy, fetch_setup, adapter, answer):
    proxy.answer = answer
    with pytest.raises(AdapterFetchFailed, match=r"the proxy (answers 40|does not send)") as failed:
        await fetch_setup.fetch(web.put("/pirate/", adapter))
    assert 0 < failed.value.retry_after < 100 * fetch_setup.scale


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    def answers(*_, **__):
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("1.1.1.1", "1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    with pytest.raises(AdapterFetchFailed, match=r"10\.0\.0\.1"):
        NetworkGuard([]).resolve("example.com", 443)
    assert NetworkGuard(["10.0.0.0/8"]).resolve("example.com", 443) == ["1.1.1.1", "10.0.0.1"]


def test_a_name_that_cannot_be_resolved_here_says_what_to_do(monkeypatch):
    def fails(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(AdapterFetchFailed, match="MOTET_RUNNER_FETCH_PROXY_GUARDS"):
        NetworkGuard([]).resolve("models.example", 443)


@pytest.mark.parametrize("proxy", ["proxy:3128", "socks5://proxy:1080", "http://", "http://a b"])
def test_a_proxy_setting_that_is_not_a_url_is_refused_at_the_start(proxy):
    with pytest.raises(ValidationError, match="fetch_proxy"):
        Settings(fetch_proxy=proxy)
