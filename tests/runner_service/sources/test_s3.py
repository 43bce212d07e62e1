"""Adapters from object stores: a store over TLS that checks signatures, the real fetch process, and failures."""

import re
from datetime import timedelta

import pytest
import yaml

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet.resources import read_text
from motet.sources import STORE_ENDPOINT
from motet_runner.settings import Settings
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.s3 import S3Uri
from motet_runner.sources.s3_refusals import AnotherRegion, refusal
from motet_runner.sources.secret import SourceCredentials
from motet_runner.sources.uri import parse
from testbed.tree import ROOT
from tests.support.in_process_runner import write_adapter
from tests.support.s3_server import error_body, s3_server
from tests.support.source_servers import BrokenConnection, EndlessBody, ErrorStatus, GzipBody, ShortBody, web_server

KEY, SECRET = "AKIAEXAMPLE", "canary/+secret=5e2b41"
CONFIG, WEIGHTS = "/models/acme/pirate/adapter_config.json", "/models/acme/pirate/adapter_model.safetensors"
PAIR = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


def write_secret(fetch_setup, tmp_path, **keys):
    """Returns how to fetch with it."""
    folder = tmp_path / "manifests"
    folder.mkdir(exist_ok=True)
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": "tenant-a"}}
    (folder / "key.yaml").write_text(yaml.safe_dump(manifest | {"stringData": keys}))
    fetch_setup.settings["manifests"] = str(folder)
    return {"credentials": "tenant-a/key"}


@pytest.fixture
def opened(store, fetch_setup, tmp_path):
    """Write the Secret with which the store opens; returns how to fetch with it."""
    store.keys[KEY] = SECRET
    return lambda **keys: write_secret(fetch_setup, tmp_path, **PAIR | keys)


@pytest.fixture
def public(store, adapter):
    """A folder that everybody may read."""
    store.public.add("models")
    return store.publish("models", "acme/pirate", adapter)


async def test_an_adapter_comes_from_a_bucket_with_signed_requests(store, fetch_setup, adapter, opened):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "README.md").write_text("hello")
    (adapter / "checkpoint-500").mkdir()
    (adapter / "checkpoint-500" / "adapter_config.json").write_text("{}")
    source = store.publish("models", "acme/pirate~v1_é", adapter)
    fetched = await fetch_setup.fetch(source, **opened())
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)
    assert not fetch_setup.partial()
    assert [one.path.rpartition("/")[2] for one in store.asked] == [
        "",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    ]
    assert all("Signature=" in one.headers["authorization"] for one in store.asked)


async def test_a_public_bucket_needs_no_secret(store, fetch_setup, adapter, public):
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)
    assert not [one for one in store.asked if "authorization" in one.headers]


async def test_a_folder_may_be_the_whole_bucket(store, fetch_setup, adapter):
    store.public.add("pirate.acme")
    store.put("/pirate.acme/", adapter)
    assert (await fetch_setup.fetch("s3://pirate.acme")).digest == adapter_digest(adapter)


async def test_temporary_keys_come_with_their_token(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    store.session_token = "session-7"
    with pytest.raises(AdapterFetchFailed, match=r"answers 400 ExpiredToken.*AWS_SESSION_TOKEN") as failed:
        await fetch_setup.fetch(source, **opened())
    assert failed.value.reason == "CredentialsInvalid"
    opened(AWS_SESSION_TOKEN="session-7")
    digest = adapter_digest(adapter)
    assert (await fetch_setup.fetch(source, expected=digest, credentials="tenant-a/key")).digest == digest


async def test_a_listing_has_several_pages(store, fetch_setup, adapter, public):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    store.publish("models", "acme/pirate", adapter)
    store.page_size = 1
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)
    assert store.listings == 3


async def test_the_region_that_the_store_names_is_taken(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    store.region = "eu-west-1"
    assert (await fetch_setup.fetch(source, **opened())).digest == adapter_digest(adapter)
    assert store.listings == 2
    assert all("/eu-west-1/s3/" in one.headers["authorization"] for one in store.asked[1:])


async def test_a_region_can_be_in_the_secret(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    store.region, store.tells_region = "eu-west-1", False
    with pytest.raises(AdapterFetchFailed, match=r"does not name: set AWS_REGION in the Secret.*MOTET_RUNNER_S3_REG"):
        await fetch_setup.fetch(source, **opened())
    opened(AWS_REGION="eu-west-1")
    digest = adapter_digest(adapter)
    assert (await fetch_setup.fetch(source, expected=digest, credentials="tenant-a/key")).digest == digest


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "is in another region, which the store does not name"),
        ({"x-amz-bucket-region": "us-east-1"}, "is in the region us-east-1. Set AWS_REGION"),
        ({"x-amz-bucket-region": "evil.example/"}, "is in another region, which"),
        ({"x-amz-bucket-region": "eu-west-1"}, "is in the region eu-west-1. Set AWS_REGION"),
        ({"x-amz-bucket-region": "us-east-1", "location": "https://10.0.0.1/"}, r"leads to 10\.0\.0\.1"),
    ],
)
async def test_a_redirect_to_another_region_is_explained(store, fetch_setup, public, headers, words):
    store.faults["/models/"] = ErrorStatus(301, headers=tuple(headers.items()), body=error_body("PermanentRedirect"))
    with pytest.raises(AdapterFetchFailed, match=words):
        await fetch_setup.fetch(public)


async def test_a_busy_store_is_asked_again(store, fetch_setup, adapter, public):
    busy = error_body("SlowDown")
    store.faults |= {"/models/": ErrorStatus(503, times=2, body=busy), WEIGHTS: ErrorStatus(503, times=2, body=busy)}
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)


async def test_an_error_may_be_compressed(store, fetch_setup, adapter, public):
    headers = (("Content-Encoding", "gzip"),)
    store.faults |= {path: ErrorStatus(503, times=2, headers=headers, body=b"?") for path in ("/models/", WEIGHTS)}
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)


async def test_a_store_that_stays_busy_is_asked_later(store, fetch_setup, public):
    store.faults["/models/"] = ErrorStatus(503, body=error_body("SlowDown"))
    with pytest.raises(AdapterFetchFailed, match=r"503 SlowDown.*MOTET_RUNNER_FETCHES_AT_ONCE") as failed:
        await fetch_setup.fetch(public)
    assert 0 < failed.value.retry_after < 10 * fetch_setup.scale
    assert store.listings == 5


async def test_a_broken_download_continues_where_it_broke(store, fetch_setup, adapter, public):
    store.faults[WEIGHTS] = BrokenConnection(after=20_000, times=3)
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)
    ranges = [one.headers.get("range") for one in store.asked_for(WEIGHTS)]
    assert ranges[0] is None
    assert all(ranges[1:])
    assert store.sent < 1.2 * sum(len(body) for body in store.files.values()), "nothing twice"


async def test_files_of_an_earlier_attempt_are_not_asked_for_again(store, fetch_setup, adapter, public):
    store.faults[WEIGHTS] = ErrorStatus(500)
    with pytest.raises(AdapterFetchFailed, match="the store answers 500"):
        await fetch_setup.fetch(public)
    store.faults.clear()
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)
    assert len(store.asked_for(CONFIG)) == 1


async def test_an_object_that_changes_after_the_listing_is_noticed(store, fetch_setup, public, tmp_path):
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    store.after_listing = lambda: store.publish("models", "acme/pirate", changed)
    with pytest.raises(AdapterFetchFailed, match=r"adapter_\w+\.\w+ of s3://models/acme/pirate/ has changed") as failed:
        await fetch_setup.fetch(public)
    assert 0 < failed.value.retry_after < 10 * fetch_setup.scale
    assert fetch_setup.cached() == []
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(changed)


async def test_an_object_that_changes_while_it_comes_is_noticed(store, fetch_setup, adapter, public, tmp_path):
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    store.faults[WEIGHTS] = BrokenConnection(after=20_000, then=lambda: store.publish("models", "acme/pirate", changed))
    with pytest.raises(AdapterFetchFailed, match=r"adapter_model\.safetensors of .* has changed"):
        await fetch_setup.fetch(public)
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(changed)


async def test_an_object_that_goes_after_the_listing_is_noticed(store, fetch_setup, public):
    store.after_listing = lambda: store.files.pop(WEIGHTS, None)
    with pytest.raises(AdapterFetchFailed, match=r"adapter_model\.safetensors of .* has changed or gone"):
        await fetch_setup.fetch(public)
    with pytest.raises(AdapterFetchFailed, match=r"has no adapter_model\.safetensors"):
        await fetch_setup.fetch(public)


async def test_a_body_that_ends_early_is_a_temporary_failure(store, fetch_setup, public):
    store.faults[WEIGHTS] = ShortBody()
    with pytest.raises(AdapterFetchFailed, match="cannot fetch") as failed:
        await fetch_setup.fetch(public)
    assert failed.value.retry_after > 0
    assert fetch_setup.cached() == []


@pytest.mark.parametrize("more", [-7, 7])
async def test_a_body_of_another_length_than_listed_is_not_taken(store, fetch_setup, public, more):
    store.claims[WEIGHTS] = len(store.files[WEIGHTS]) + more
    with pytest.raises(AdapterFetchFailed, match=r"the store sends \d+ bytes, but its listing says \d+"):
        await fetch_setup.fetch(public)
    assert fetch_setup.cached() == []


async def test_an_endless_body_is_cut_at_the_listed_length(store, fetch_setup, public):
    store.faults[CONFIG] = EndlessBody()
    with pytest.raises(AdapterFetchFailed, match=r"adapter_config\.json of .* has changed") as failed:
        await fetch_setup.fetch(public)
    assert failed.value.retry_after > 0
    assert store.sent < 64 << 20


async def test_compressed_answers_are_refused_unopened(store, fetch_setup, public):
    store.faults[WEIGHTS] = GzipBody(b"x" * len(store.files[WEIGHTS]))
    with pytest.raises(AdapterFetchFailed, match=r"adapter_model\.safetensors of .* is sent compressed"):
        await fetch_setup.fetch(public)


async def test_weights_beyond_what_the_pool_admits_are_not_asked_for(store, fetch_setup, public):
    with pytest.raises(AdapterFetchFailed, match="fetches at most 1000") as failed:
        await fetch_setup.fetch(public, max_bytes=1000)
    assert failed.value.reason == "TooLarge"
    assert len(store.asked) == 1


async def test_a_folder_with_only_a_pickle_is_refused_with_advice(store, fetch_setup, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    store.public.add("models")
    with pytest.raises(AdapterFetchFailed, match=r"has adapter_model\.bin but no"):
        await fetch_setup.fetch(store.publish("models", "acme/pirate", adapter))


async def test_a_listing_without_end_is_given_up(store, fetch_setup, public):
    store.goes_on = True
    with pytest.raises(AdapterFetchFailed, match=r"20000 files or 20 pages.*a folder of their own") as failed:
        await fetch_setup.fetch(public)
    assert failed.value.reason == "TooLarge"
    assert store.listings == 20


async def test_a_page_without_end_does_not_fill_the_memory(store, fetch_setup, public):
    store.faults["/models/"] = EndlessBody()
    with pytest.raises(AdapterFetchFailed, match="more than 4194304 bytes"):
        await fetch_setup.fetch(public)
    assert store.sent < 64 << 20


async def test_a_folder_of_too_many_files_is_given_up(store, fetch_setup, public):
    entry = "<Contents><Key>acme/pirate/{}</Key><Size>1</Size></Contents>"
    store.more_entries = "".join(entry.format(number) for number in range(20_000))
    with pytest.raises(AdapterFetchFailed, match="20000 files or 20 pages"):
        await fetch_setup.fetch(public)
    assert store.listings == 1


async def test_no_listed_name_leads_out_of_the_folder(store, fetch_setup, adapter, public):
    names = ("../evil.json", "/tmp/evil", "a%0Ab", "..", "", "x/adapter_config.json", "adapter_config.json/")
    store.more_entries = "".join(f"<Contents><Key>acme/pirate/{name}</Key><Size>1</Size></Contents>" for name in names)
    assert (await fetch_setup.fetch(public)).digest == adapter_digest(adapter)
    store.more_entries = "<Contents><Key>others/adapter_config.json</Key><Size>1</Size></Contents>"
    with pytest.raises(AdapterFetchFailed, match="lists files outside of the folder") as failed:
        await fetch_setup.fetch(public, proven=True, expected="sha256:" + "0" * 64)
    assert failed.value.retry_after > 0


@pytest.mark.parametrize("path", ["/models/", WEIGHTS], ids=["listing", "object"])
async def test_row_33_a_redirect_to_a_private_address_is_not_followed(  # noqa: PLR0917
    store, fetch_setup, adapter, opened, tmp_path, path
):
    source = store.publish("models", "acme/pirate", adapter)
    async with web_server(tmp_path, "127.0.0.2") as inside:
        store.faults[path] = ErrorStatus(307, headers=(("Location", inside.url("/x")),))
        with pytest.raises(AdapterFetchFailed, match=r"leads to 127\.0\.0\.2.*FETCH_ALLOWED_HOSTS") as failed:
            await fetch_setup.fetch(source, **opened())
        assert failed.value.retry_after == 0
        assert inside.asked == []


async def test_a_redirect_to_another_host_is_followed_without_a_signature(
    store, fetch_setup, adapter, opened, tmp_path
):
    source = store.publish("models", "acme/pirate", adapter)
    async with web_server(tmp_path, "127.0.0.3") as other:
        both = tmp_path / "both.pem"
        both.write_bytes(store.ca_file.read_bytes() + other.ca_file.read_bytes())
        fetch_setup.settings |= {"fetch_allowed_hosts": ["127.0.0.3"], "fetch_ca_file": str(both)}
        other.put("/x/", adapter)
        store.faults[WEIGHTS] = ErrorStatus(307, headers=(("Location", other.url("/x/adapter_model.safetensors")),))
        assert (await fetch_setup.fetch(source, **opened())).digest == adapter_digest(adapter)
        assert not [name for name in other.asked[0].headers if name.startswith(("x-amz", "auth"))]


@pytest.mark.parametrize("path", ["/models/", WEIGHTS], ids=["listing", "object"])
async def test_row_33_a_redirect_to_another_port_of_the_platforms_store_is_not_followed(
    store, fetch_setup, public, tmp_path, path
):
    async with web_server(tmp_path) as other:
        store.faults[path] = ErrorStatus(307, headers=(("Location", other.url("/x")),))
        with pytest.raises(AdapterFetchFailed, match=r"leads to 127\.0\.0\.1, which is not a public address"):
            await fetch_setup.fetch(public)
        assert other.asked == []


async def test_row_33_a_redirect_to_plain_http_is_not_followed(store, fetch_setup, public):
    store.faults[WEIGHTS] = ErrorStatus(307, headers=(("Location", "http://127.0.0.1/"),))
    with pytest.raises(AdapterFetchFailed, match="redirects to http://"):
        await fetch_setup.fetch(public)


async def test_a_secret_names_a_store_of_its_own(store, fetch_setup, adapter, opened, tmp_path):
    fetch_setup.settings["s3_endpoint"] = ""
    fetch_setup.settings["fetch_allowed_hosts"] = ["127.0.0.1"]
    source = store.publish("models", "acme/pirate", adapter)
    assert (await fetch_setup.fetch(source, **opened(AWS_ENDPOINT_URL=store.base + "/"))).digest == adapter_digest(
        adapter
    )


async def test_a_public_bucket_of_another_store_is_named_by_a_secret_without_keys(
    store, fetch_setup, adapter, public, tmp_path
):
    fetch_setup.settings |= {"s3_endpoint": "", "fetch_allowed_hosts": ["127.0.0.1"]}
    how = write_secret(fetch_setup, tmp_path, AWS_ENDPOINT_URL=store.base)
    assert (await fetch_setup.fetch(public, **how)).digest == adapter_digest(adapter)
    assert not [one for one in store.asked if "authorization" in one.headers]


async def test_the_platforms_store_named_by_a_secret_is_the_platforms(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    assert (await fetch_setup.fetch(source, **opened(AWS_ENDPOINT_URL=store.base + "/"))).digest == adapter_digest(
        adapter
    )


@pytest.mark.parametrize(("named", "same"), [("https://s3:443/", True), ("https://S3", True), ("https://s3:80", False)])
def test_the_platforms_store_is_the_same_with_and_without_its_usual_port(named: str, same: bool) -> None:
    secret = SourceCredentials({STORE_ENDPOINT: named})
    for platform in ("https://s3", "https://s3:443"):
        hosts = parse("s3://models/a", "").hosts(NetworkAccess(s3_endpoint=platform), secret)
        assert hosts == ([("s3", 443)] if same else [])


async def test_a_folder_with_a_space_in_its_name(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/run books", adapter)
    assert (await fetch_setup.fetch(source, **opened())).digest == adapter_digest(adapter)


async def test_row_33_a_secret_opens_no_way_to_private_addresses_not_even_to_the_platforms_store(
    store, fetch_setup, adapter, opened, tmp_path
):
    source = store.publish("models", "acme/pirate", adapter)
    async with s3_server(tmp_path / "other") as other:
        with pytest.raises(AdapterFetchFailed, match=r"leads to 127\.0\.0\.1, which is not a public address"):
            await fetch_setup.fetch(source, **opened(AWS_ENDPOINT_URL=other.base))
        assert other.asked == store.asked == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://store.example",
        "https://",
        "store.example",
        "https://a@b",
        "https://store.example/x",
        "https://a?b",
        "https://store.example:99999",
    ],
)
async def test_an_odd_endpoint_of_a_secret_is_refused_by_its_key(store, fetch_setup, opened, endpoint):
    with pytest.raises(AdapterFetchFailed, match="AWS_ENDPOINT_URL of the Secret in source") as failed:
        await fetch_setup.fetch("s3://models/acme/pirate", **opened(AWS_ENDPOINT_URL=endpoint))
    assert failed.value.reason == "CredentialsInvalid"


async def test_an_odd_region_of_a_secret_is_refused_by_its_key(store, fetch_setup, opened):
    with pytest.raises(AdapterFetchFailed, match="AWS_REGION of the Secret"):
        await fetch_setup.fetch("s3://models/acme/pirate", **opened(AWS_REGION="evil.example/"))
    assert store.asked == []


@pytest.mark.parametrize("ahead", [timedelta(minutes=20), timedelta(minutes=-20)])
async def test_a_wrong_clock_is_named(store, fetch_setup, adapter, opened, ahead):
    source = store.publish("models", "acme/pirate", adapter)
    store.clock_ahead = ahead
    with pytest.raises(AdapterFetchFailed, match=r"RequestTimeTooSkewed: the clock of this runner's machine.*Set the"):
        await fetch_setup.fetch(source, **opened())


async def test_wrong_keys_are_told_apart_and_no_message_has_one(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    for keys, words in [
        ({"AWS_ACCESS_KEY_ID": "AKIAOTHER"}, "InvalidAccessKeyId: it does not know AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": SECRET + "x"}, "SignatureDoesNotMatch: AWS_SECRET_ACCESS_KEY"),
    ]:
        with pytest.raises(AdapterFetchFailed, match=words) as failed:
            await fetch_setup.fetch(source, proven=words.startswith("Inv"), **opened(**keys))
        assert failed.value.reason == "CredentialsInvalid"
        assert not any(word in failed.value.message for word in ("canary", "AKIA", "geheim"))
    with pytest.raises(AdapterFetchFailed, match=r"not public\. Name a Secret in source\.credentialsSecretRef"):
        await fetch_setup.fetch(source)


async def test_keys_that_are_swapped_are_named(store, fetch_setup, adapter, opened):
    source = store.publish("models", "acme/pirate", adapter)
    with pytest.raises(
        AdapterFetchFailed, match=r"400 AuthorizationHeaderMalformed.*Are the two keys swapped"
    ) as failed:
        await fetch_setup.fetch(source, **opened(AWS_ACCESS_KEY_ID=SECRET, AWS_SECRET_ACCESS_KEY=KEY))
    assert failed.value.reason == "CredentialsInvalid"
    assert not any(word in failed.value.message for word in ("canary", "AKIA"))


async def test_a_missing_bucket_is_named(fetch_setup, store):
    store.public |= {"models", "nothing"}
    with pytest.raises(AdapterFetchFailed, match=r"^s3://nothing/a/ answers 404 NoSuchBucket.*Correct source\.uri"):
        await fetch_setup.fetch("s3://nothing/a")


async def test_the_manifest_of_the_guide_is_fetched(store, fetch_setup, adapter, tmp_path):
    page = (ROOT / "docs/guides/adapters.md").read_text()
    section = page.split("## Serve one from a bucket")[1].split("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    read = read_text(text, file="page.yaml")
    assert not read.problems
    declared, secret = (manifest.resource for manifest in read.manifests)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/page.yaml").write_text(text)
    fetch_setup.settings["manifests"] = str(tmp_path / "manifests")
    store.keys[secret.string_data["AWS_ACCESS_KEY_ID"]] = secret.string_data["AWS_SECRET_ACCESS_KEY"]
    store.publish("adapters", "acme/pirate", adapter)
    source = declared.spec.source
    named = f"{declared.metadata.namespace}/{source.credentials_secret_ref.name}"
    assert (await fetch_setup.fetch(source.uri, credentials=named)).digest == adapter_digest(adapter)


@pytest.mark.parametrize(
    ("status", "code", "given", "words", "reason"),
    [
        (
            403,
            "AccessDenied",
            True,
            r"Secret in source\.credentialsSecretRef .* s3:ListBucket and s3:GetObject",
            "Cred",
        ),
        (403, "AccessDenied", False, r"Name a Secret in source\.credentialsSecretRef", "Cred"),
        (401, "", False, r"Name a Secret in source\.credentialsSecretRef", "Cred"),
        (400, "InvalidToken", True, "AWS_SESSION_TOKEN", "Cred"),
        (403, "InvalidObjectState", True, "is archived", ""),
        (404, "NoSuchBucket", False, r"Correct source\.uri", ""),
        (400, "Whatever", False, "the store answers 400 Whatever", ""),
        (405, "", False, "the store answers 405", ""),
    ],
)
def test_each_refusal_names_what_to_change(status, code, given, words, reason):
    failed = refusal("s3://b/a/", "the listing", status, code, given=given)
    assert re.search(words, failed.message)
    assert (failed.reason or "").startswith(reason)
    assert failed.retry_after > 0


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://b-1.x", "b-1.x", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b", "bucket", "a/b/"),
        ("s3://bucket/a/", "bucket", "a/"),
    ],
)
def test_a_uri_is_a_bucket_and_the_start_of_names(uri, bucket, prefix):
    assert parse(uri) == S3Uri(bucket, prefix)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3:///a", "does not name a bucket"),
        ("s3://UPPER/a", "does not name a bucket"),
        ("s3://ab/a", "does not name a bucket"),
        ("s3://a..b/a", "does not name a bucket"),
        ("s3://bucket:9000/a", "does not name a bucket"),
        ("s3://bucket//a", "an empty part"),
        ("s3://bucket/a/../b", r"'\.\.'"),
        ("s3://bucket/./b", r"'\.'"),
        ("s3://bucket/a//", "an empty part"),
        ("s3://bucket/" + "a" * 900, "900 bytes"),
        ("s3://key:geheim@bucket/a", "Put them into a Secret"),
    ],
)
def test_row_32_an_odd_uri_is_refused_with_a_reason(uri, words):
    with pytest.raises(AdapterFetchFailed, match=words) as failed:
        parse(uri)
    assert "geheim" not in failed.value.message


def test_only_the_platforms_own_store_is_allowed_whatever_its_address_is():
    uri, access = S3Uri("bucket", ""), NetworkAccess(s3_endpoint="http://minio.local:9000/")
    assert uri.hosts(access, SourceCredentials()) == [("minio.local", 9000)]
    for same in ({}, {"AWS_ENDPOINT_URL": ""}, {"AWS_ENDPOINT_URL": "http://MinIO.local:9000"}):
        assert uri.hosts(access, SourceCredentials(same)) == [("minio.local", 9000)]
    for other in ("https://minio.local", "https://minio.local:9443", "http://minio.local:9001"):
        assert uri.hosts(access, SourceCredentials({"AWS_ENDPOINT_URL": other})) == []
    assert uri.hosts(NetworkAccess(), SourceCredentials()) == []
    for endpoint, port in (("http://[::1]", 80), ("https://minio.local/", 443)):
        assert [found for _, found in uri.hosts(NetworkAccess(s3_endpoint=endpoint), SourceCredentials())] == [port]


ODD = (
    "https://",
    "http://münchen:9000",
    "https://a?b",
    "http://s3.example:99999",
    "http://s3.example:0",
    "https://[1:",
)


def test_the_platforms_endpoint_is_an_address_without_a_path():
    for endpoint in ("", "https://s3.example", "http://minio:9000/", "https://[::1]:9000"):
        assert Settings(s3_endpoint=endpoint).s3_endpoint == endpoint
    for endpoint in ("s3.example", "https://s3.example/a", "https://me:geheim@s3.example", "ftp://s3.example", *ODD):
        with pytest.raises(ValueError, match="s3_endpoint"):
            Settings(s3_endpoint=endpoint)


def test_another_region_is_tried_again_after_minutes():
    assert AnotherRegion("s3://b/", "eu-west-1").retry_after == 300
