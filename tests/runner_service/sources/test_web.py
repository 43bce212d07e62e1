"""Adapters from the web: a real server over TLS, the real fetch process, and failures between them."""

import asyncio
import gzip
import hashlib
import json
from collections.abc import Iterator

import httpx2
import pytest

from motet.digest import ADAPTER_OPTIONAL_FILES, adapter_digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.source_access import RemoteFiles
from motet_runner.sources.web_folder import WebFolder
from tests.common.waiting import PATIENCE_S
from tests.support.in_process_runner import write_adapter
from tests.support.source_servers import (
    BrokenConnection,
    EndlessBody,
    ErrorStatus,
    GzipBody,
    ShortBody,
    SlowBody,
    web_server,
)

WEIGHTS = "/pirate/adapter_model.safetensors"
CONFIG = "/pirate/adapter_config.json"


async def test_an_adapter_comes_from_a_folder_on_the_web(web, fetch_setup, adapter):
    fetched = await fetch_setup.fetch(web.put("/pirate/", adapter))
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)
    assert fetch_setup.cached() == [fetched.digest.removeprefix("sha256:")]
    assert not fetch_setup.partial()
    assert {one.path for one in web.asked} == {CONFIG, WEIGHTS, *(f"/pirate/{name}" for name in ADAPTER_OPTIONAL_FILES)}


@pytest.mark.parametrize("status", [404, 403, 410])
async def test_optional_files_are_fetched_if_they_exist(web, fetch_setup, adapter, status):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    source = web.put("/pirate/", adapter)
    for name in set(ADAPTER_OPTIONAL_FILES) - {"chat_template.jinja"}:
        web.faults[f"/pirate/{name}"] = ErrorStatus(status)
    fetched = await fetch_setup.fetch(source)
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)
    assert (fetched.folder / "chat_template.jinja").read_text() == "{{ messages }}"


async def test_an_optional_file_that_may_be_there_is_not_left_out_because_the_server_is_in_trouble(
    web, fetch_setup, adapter
):
    source = web.put("/pirate/", adapter)
    web.faults["/pirate/chat_template.jinja"] = ErrorStatus(503)
    with pytest.raises(AdapterFetchFailed, match="the server answers 503"):
        await fetch_setup.fetch(source)
    assert fetch_setup.cached() == []


async def test_a_file_is_not_taken_to_be_missing_when_the_server_answers_416_to_a_request_for_all_of_it(
    web, fetch_setup, adapter
):
    source = web.put("/pirate/", adapter)
    web.faults["/pirate/chat_template.jinja"] = ErrorStatus(416)
    with pytest.raises(AdapterFetchFailed, match="the server answers 416"):
        await fetch_setup.fetch(source)
    assert fetch_setup.cached() == []


async def test_a_broken_download_continues_where_it_broke(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = BrokenConnection(after=20_000, times=3)
    fetched = await fetch_setup.fetch(source)
    assert fetched.digest == adapter_digest(adapter)
    ranges = [one.headers.get("range") for one in web.wanted(WEIGHTS)]
    assert ranges[0] is None
    assert all(wanted is not None and wanted != "bytes=0-" for wanted in ranges[1:])
    assert web.sent < 1.2 * sum(len(body) for body in web.files.values()), "nothing twice"


async def test_a_file_that_changes_between_two_attempts_is_begun_again(web, fetch_setup, adapter, tmp_path):
    source = web.put("/pirate/", adapter)
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    web.faults[WEIGHTS] = BrokenConnection(after=20_000, then=lambda: web.put("/pirate/", changed))
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(changed)


async def test_a_folder_that_is_overwritten_between_two_files_is_fetched_again(web, fetch_setup, adapter, tmp_path):
    """Else the configuration of one version would be served with the weights of the next one."""
    source = web.put("/pirate/", adapter)
    changed = write_adapter(tmp_path / "other", rank=256)
    web.faults[WEIGHTS] = BrokenConnection(after=20_000, then=lambda: web.put("/pirate/", changed))
    with pytest.raises(AdapterFetchFailed, match=r"adapter_config\.json was overwritten while") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.retry_after > 0
    assert fetch_setup.cached() == []
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(changed)


async def test_a_server_that_is_busy_when_it_is_asked_again_has_changed_nothing(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    busy = lambda: web.faults.update({CONFIG: ErrorStatus(503, times=2)})  # noqa: E731
    web.faults[WEIGHTS] = BrokenConnection(after=20_000, then=busy)
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    assert web.asked_for(CONFIG)[-1].headers["if-none-match"]


async def test_files_of_an_earlier_attempt_are_not_fetched_again(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = ErrorStatus(503)
    with pytest.raises(AdapterFetchFailed, match="answers 503") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.retry_after > 0
    web.faults.clear()
    await fetch_setup.fetch(source)
    continued, compared, _ = web.asked_for(CONFIG)[-3:]
    assert continued.headers["if-range"] == compared.headers["if-none-match"]
    assert web.sent == sum(len(body) for body in web.files.values())


async def test_a_too_short_body_is_a_temporary_failure(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = ShortBody()
    with pytest.raises(AdapterFetchFailed, match="cannot fetch") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.retry_after > 0
    assert fetch_setup.cached() == []


async def test_a_very_slow_server_is_given_up(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = SlowBody()
    with pytest.raises(AdapterFetchFailed, match=r"gave \d+ bytes in") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.retry_after > 0


async def test_a_fetch_from_a_very_slow_server_fails_in_the_end(web, fetch_setup, adapter):
    """Its fetch fails, keeps what has arrived, and later continues from there."""
    fetch_setup.settings |= {"fetch_stall_seconds": 10}
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = SlowBody(bytes=300)
    with pytest.raises(AdapterFetchFailed, match=r"in 5 s.*faster server.*FETCH_KIB_PER_SECOND") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.retry_after > 0
    came = sum(path.stat().st_size for path in fetch_setup.partial())
    web.faults.clear()
    await fetch_setup.fetch(source)
    assert came > len(web.files[CONFIG])
    assert web.sent < sum(len(body) for body in web.files.values())


@pytest.mark.parametrize("at_once", [2, 4])
async def test_a_tenant_with_very_slow_servers_does_not_block_others(web, fetch_setup, adapter, tmp_path, at_once):
    fetch_setup.settings |= {"fetches_at_once": at_once, "fetch_stall_seconds": 10_000, "fetch_kib_per_second": 1}
    sources = fetch_setup.sources
    dripping = [web.put(f"/slow-{number}/", adapter) for number in range(at_once + 1)]
    for number in range(at_once + 1):
        web.faults[f"/slow-{number}/adapter_model.safetensors"] = SlowBody()

    def fetch(uri, tenant):
        into = tmp_path / hashlib.sha256(uri.encode()).hexdigest()
        return sources.fetch_into(
            "adapter", RemoteFiles(uri=uri, namespace=tenant, max_bytes=1 << 20), into, lambda *_: None
        )

    slow = [asyncio.create_task(fetch(uri, "tenant-a")) for uri in dripping]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while web.open < at_once - 1:
                await asyncio.sleep(0.02)
        async with asyncio.timeout(PATIENCE_S):
            await fetch(web.put("/quick/", adapter), "tenant-b")
        assert len({one.path for one in web.asked if "slow" in one.path and one.path.endswith(".json")}) == at_once - 1
        assert not any(one.done() for one in slow)
    finally:
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_row_34_a_gzip_bomb_is_refused_unopened(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = GzipBody(gzip.compress(bytes(64 << 20)))
    with pytest.raises(AdapterFetchFailed, match="is sent compressed"):
        await fetch_setup.fetch(source)
    assert not fetch_setup.partial()


async def test_row_34_an_endless_body_is_cut_at_the_limit(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[WEIGHTS] = EndlessBody()
    with pytest.raises(AdapterFetchFailed, match="more than 1048576") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.reason == "TooLarge"
    assert not fetch_setup.partial()


async def test_weights_beyond_what_the_pool_admits_are_not_begun(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    with pytest.raises(AdapterFetchFailed, match="fetches at most 1000") as failed:
        await fetch_setup.fetch(source, max_bytes=1000)
    assert failed.value.reason == "TooLarge"
    assert failed.value.retry_after == 0


async def test_row_26_a_truncated_file_is_refused_and_nothing_is_cached(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.files[WEIGHTS] = web.files[WEIGHTS][:-100]
    with pytest.raises(AdapterIncompatible, match="its header lists"):
        await fetch_setup.fetch(source)
    with pytest.raises(AdapterFetchFailed) as failed:
        await fetch_setup.fetch(source, expected=adapter_digest(adapter))
    assert failed.value.reason == "DigestMismatch"
    assert fetch_setup.cached() == []


async def test_row_27_a_flipped_bit_is_another_digest(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    body = bytearray(web.files[WEIGHTS])
    body[-1] ^= 1
    web.files[WEIGHTS] = bytes(body)
    with pytest.raises(AdapterFetchFailed, match="has the digest") as failed:
        await fetch_setup.fetch(source, expected=adapter_digest(adapter))
    assert (failed.value.reason, failed.value.retry_after) == ("DigestMismatch", 0)
    assert fetch_setup.cached() == []
    assert not fetch_setup.partial(), "wrong bytes are not gone on with"


async def test_row_30_a_pickle_under_a_safe_name_is_refused_unopened(web, fetch_setup, adapter, tmp_path):
    source = web.put("/pirate/", adapter)
    proof = tmp_path / "code-ran"
    web.files[WEIGHTS] = b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    with pytest.raises(AdapterIncompatible, match="not a safetensors file"):
        await fetch_setup.fetch(source)
    assert not proof.exists()


async def test_row_31_a_huge_configuration_is_cut_off(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.files[CONFIG] = json.dumps({"peft_type": "LORA", "x": "y" * (2 << 20)}).encode()
    with pytest.raises(AdapterFetchFailed, match="at most 1048576") as failed:
        await fetch_setup.fetch(source)
    assert failed.value.reason == "TooLarge"


async def test_row_33_a_redirect_to_a_loopback_address_is_not_followed(web, fetch_setup, adapter, tmp_path):
    source = web.put("/pirate/", adapter)
    async with web_server(tmp_path, "127.0.0.2") as inside:
        inside.put("/pirate/", adapter)
        web.faults[CONFIG] = ErrorStatus(302, headers=(("Location", inside.url(CONFIG)),))
        with pytest.raises(AdapterFetchFailed, match=r"leads to 127\.0\.0\.2.*FETCH_ALLOWED_HOSTS") as failed:
            await fetch_setup.fetch(source)
        assert failed.value.retry_after == 0
        assert inside.asked == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "[::1]", "localhost", "169.254.169.254", "10.0.0.1", "[::ffff:10.0.0.1]", "0.0.0.0"]
)
async def test_row_33_no_source_leads_to_a_private_address(fetch_setup, address):
    with pytest.raises(AdapterFetchFailed, match="not a public address"):
        await fetch_setup.fetch(f"https://{address}/latest/meta-data/")


async def test_row_33_a_redirect_to_plain_http_is_not_followed(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[CONFIG] = ErrorStatus(302, headers=(("Location", "http://127.0.0.1/"),))
    with pytest.raises(AdapterFetchFailed, match="redirects to http://"):
        await fetch_setup.fetch(source)


@pytest.mark.parametrize("location", ["https://host:443/new/x", "https://host/new/x"])
def test_a_redirect_to_the_same_server_with_its_usual_port_written_keeps_the_secret(location: str, tmp_path) -> None:
    def server(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.startswith("/old/"):
            return httpx2.Response(302, headers={"location": location})
        assert request.headers.get("authorization") == "Bearer t"
        return httpx2.Response(200, content=iter([b"ok"]), headers={"content-length": "2"})

    client = httpx2.Client(transport=httpx2.MockTransport(server))
    folder = WebFolder("https://host/old/", client, {"authorization": "Bearer t"}, lambda *_: 0, 0.01)
    folder.fetch(WantedFile("x", 100), tmp_path)
    assert (tmp_path / "x").read_bytes() == b"ok"


async def test_the_number_of_redirects_is_limited(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[CONFIG] = ErrorStatus(302, headers=(("Location", CONFIG),))
    with pytest.raises(AdapterFetchFailed, match="more than 5 times"):
        await fetch_setup.fetch(source)


async def test_a_redirect_to_a_store_is_followed_without_the_credentials(web, fetch_setup, adapter, tmp_path):
    source = web.put("/pirate/", adapter)
    async with web_server(tmp_path, "127.0.0.3") as store:
        both = tmp_path / "both.pem"
        both.write_bytes(web.ca_file.read_bytes() + store.ca_file.read_bytes())
        fetch_setup.settings |= {"fetch_allowed_hosts": ["127.0.0.0/24"], "fetch_ca_file": str(both)}
        manifests = tmp_path / "manifests"
        manifests.mkdir()
        (manifests / "secret.yaml").write_text(
            "apiVersion: v1\nkind: Secret\nmetadata: {name: key, namespace: tenant-a}\nstringData: {token: open}\n"
        )
        fetch_setup.settings["manifests"] = str(manifests)
        store.put("/store/", adapter)
        web.authorization = "Bearer open"
        web.faults[WEIGHTS] = ErrorStatus(302, headers=(("Location", store.url("/store/adapter_model.safetensors")),))
        assert (await fetch_setup.fetch(source, credentials="tenant-a/key")).digest == adapter_digest(adapter)
        assert "authorization" not in store.asked[0].headers


async def test_a_server_with_an_untrusted_certificate_is_refused(web, fetch_setup, adapter):
    fetch_setup.settings["fetch_ca_file"] = ""
    with pytest.raises(AdapterFetchFailed, match="FETCH_CA_FILE"):
        await fetch_setup.fetch(web.put("/pirate/", adapter))


async def test_a_missing_source_is_tried_again_after_minutes(web, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match=r"has no adapter_config\.json") as failed:
        await fetch_setup.fetch(web.url("/nowhere/"))
    assert failed.value.retry_after == pytest.approx(300 * fetch_setup.scale, rel=0.25)
    assert len(web.asked) == 1, "asking again at once would not help"


async def test_each_failure_that_may_pass_is_waited_for_longer(web, fetch_setup, adapter):
    source = web.put("/pirate/", adapter)
    web.faults[CONFIG] = ErrorStatus(500)
    waits = []
    for _ in range(3):
        with pytest.raises(AdapterFetchFailed) as failed:
            await fetch_setup.fetch(source)
        waits.append(failed.value.retry_after)
    assert waits[0] * 1.2 < waits[1] < waits[2]
    web.faults.clear()
    await fetch_setup.fetch(source)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("https://host/folder", "end with a slash"),
        ("https://host/folder/?key=geheim", r"no \? or #"),
        ("https://me:geheim@host/folder/", "Put them into a Secret"),
        ("ftp://host/folder/", "source.uri: must begin with file:// or hf:// or https:// or oci:// or s3://"),
        ("hf://only-one-word", "is not a repository"),
        ("hf://org/../secrets", "is not a repository"),
        ("https://[", "not a URI"),
    ],
)
async def test_row_32_an_odd_uri_is_refused_with_a_reason(fetch_setup, uri, words):
    with pytest.raises(AdapterFetchFailed, match=words) as failed:
        await fetch_setup.fetch(uri)
    assert "geheim" not in failed.value.message


async def test_a_digest_alone_gives_no_access_to_a_source(web, fetch_setup, adapter):
    """A tenant who knows another tenant's digest must still have access to the source."""
    fetched = await fetch_setup.fetch(web.put("/pirate/", adapter))
    with pytest.raises(AdapterFetchFailed, match="has no adapter_config"):
        await fetch_setup.fetch(web.url("/elsewhere/"), expected=fetched.digest)
    asked = len(web.asked)
    again = await fetch_setup.fetch(web.url("/pirate/"), expected=fetched.digest)
    assert again.digest == fetched.digest
    assert len(web.asked) == asked, "from there it is known"


async def test_repeated_orders_for_an_unfetchable_adapter_do_not_overload_its_source(web, fetch_setup, adapter):
    source, digest = web.put("/pirate/", adapter), adapter_digest(adapter)
    web.faults[CONFIG] = ErrorStatus(403)
    for _ in range(5):
        with pytest.raises(AdapterFetchFailed, match="answers 403"):
            await fetch_setup.fetch(source, expected=digest, proven=True)
    assert len(web.asked) == 1
    web.faults.clear()
    checked = await fetch_setup.fetch(source, expected=digest)  # a changed spec is tried at once
    assert checked.digest == digest


OLD, NEW = b"o" * 1000, b"n" * 1000


def broken() -> Iterator[bytes]:
    yield OLD[:400]
    raise httpx2.ReadError("the connection is gone")


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "all of it"])
@pytest.mark.parametrize("names", [True, False], ids=["an ETag", "no ETag"])
def test_a_server_that_knows_ranges_alone_gives_no_mixture_of_two_versions(whole: bool, names: bool, tmp_path) -> None:
    """The file is overwritten once a part of it, or all of it, has come. The next request names the old version, and
    the server does not look at that."""
    asked: list[httpx2.Headers] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers)
        if len(asked) == 1:
            begun = {"etag": '"old"', "content-length": "1000"}
            return httpx2.Response(200, headers=begun, content=iter([OLD]) if whole else broken())
        etag = {"etag": '"new"'} if names else {}
        if "range" not in request.headers:
            return httpx2.Response(200, headers=etag, content=iter([NEW]))
        begin = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
        if begin == len(NEW):
            return httpx2.Response(416, headers={"content-range": "bytes */1000"})
        range_of = {"content-range": f"bytes {begin}-999/1000"}
        return httpx2.Response(206, headers=etag | range_of, content=iter([NEW[begin:]]))

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    source = WebFolder("https://acme/a/", client, {}, lambda *_: 0, 0.01)
    for _ in range(1 + whole):
        assert source.fetch(WantedFile("weights", limit=5000), tmp_path)
    assert (tmp_path / "weights").read_bytes() == NEW
    assert asked[1]["if-range"] == '"old"'


def test_a_part_that_ends_before_the_file_is_no_whole_file(tmp_path) -> None:
    """RFC 9110 lets a server answer with less than was asked for."""
    begun: list[int] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        etag = {"etag": '"old"'}
        if "range" not in request.headers:
            return httpx2.Response(200, headers=etag | {"content-length": "1000"}, content=broken())
        begun.append(begin := int(request.headers["range"].removeprefix("bytes=").removesuffix("-")))
        range_of = {"content-range": f"bytes {begin}-{begin + 199}/1000"}
        return httpx2.Response(206, headers=etag | range_of, content=iter([OLD[begin : begin + 200]]))

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    source = WebFolder("https://acme/a/", client, {}, lambda *_: 0, 0.01)
    assert source.fetch(WantedFile("weights", limit=5000), tmp_path)
    assert (tmp_path / "weights").read_bytes() == OLD
    assert begun == [400, 600, 800]


def test_a_file_of_unknown_size_asks_seldom_for_room_and_not_for_much_more_than_it_takes(tmp_path):
    """Each time, the service lists its whole cache."""
    chunk, count, asked = b"x" * (1 << 20), 160, []
    client = httpx2.Client(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(200, content=iter([chunk] * count)))
    )
    source = WebFolder("https://acme/a/", client, {}, lambda files, less=(): asked.extend(files.values()) or 0)
    assert source.fetch(WantedFile("weights", limit=1 << 30), tmp_path)
    assert len(asked) < count / 2
    assert count << 20 <= asked[-1] < 1.1 * (count << 20)
