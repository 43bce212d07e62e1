"""Adapters from OCI registries: a registry over TLS with a realm, the real fetch process, and what may be wrong."""

import io
import json
import re
import tarfile

import httpx2
import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from motet.resources import read_text
from motet_runner.sources.fetch_errors import RETRY_LATER_SECONDS
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.oci import OciUri, parse
from motet_runner.sources.oci_manifest import MAX_LAYERS, MAX_MANIFEST_BYTES, MAX_MANIFESTS
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.secret import NO_CREDENTIALS
from testbed.tree import ROOT
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.in_process_runner import write_adapter
from tests.support.registry_server import MANIFEST, TITLE, basic, digest_of, docker_config, registry_server
from tests.support.source_servers import (
    BrokenConnection,
    EndlessBody,
    ErrorStatus,
    GzipBody,
    ShortBody,
    SlowBody,
    web_server,
)

USER, PASSWORD = "robot", "canary:/+geheim 5e2b41"
REPOSITORY = "acme/pirate"
DIGITS = "0123456789abcdef" * 4


@pytest.fixture
def source(registry, adapter):
    return registry.publish(REPOSITORY, "v1", adapter)


@pytest.fixture
def closed(registry, fetch_setup, tmp_path):
    """Close the registry; returns how to fetch with its Secret."""
    registry.users[USER] = PASSWORD
    return lambda **keys: write_secret(fetch_setup, tmp_path, **keys or {"username": USER, "password": PASSWORD})


def blob_of(registry, name, repository=REPOSITORY):
    """The path of a file's blob."""
    manifest = json.loads(registry.files[f"/v2/{repository}/manifests/v1"])
    (digest,) = [one["digest"] for one in manifest["layers"] if one["annotations"][TITLE] == name]
    return f"/v2/{repository}/blobs/{digest}"


async def refused(fetch_setup, source, words, **how):
    with pytest.raises(AdapterFetchFailed, match=words) as failed:
        await fetch_setup.fetch(source, **how)
    assert "\n" not in failed.value.message
    assert fetch_setup.cached() == []
    return failed.value


async def test_an_adapter_comes_from_a_public_registry(registry, fetch_setup, adapter):
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "README.md").write_text("hello")
    source = registry.publish(REPOSITORY, "v1", adapter)
    fetched = await fetch_setup.fetch(source)
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)
    assert not fetch_setup.partial()
    assert registry.manifests_asked == ["v1"]
    assert len(registry.asked) == 1 + 3, "the README is not asked for"
    assert not [one for one in registry.asked if "authorization" in one.headers]


async def test_a_digest_names_the_manifest_and_comes_before_the_tag(registry, fetch_setup, adapter, tmp_path):
    source = registry.publish(REPOSITORY, "v1", adapter)
    pinned = f"{source}@{registry.digest(REPOSITORY, 'v1')}"
    registry.publish(REPOSITORY, "v1", write_adapter(tmp_path / "other", seed=5))
    assert (await fetch_setup.fetch(pinned)).digest == adapter_digest(adapter)
    without_tag = pinned.replace(":v1@", "@")
    assert (await fetch_setup.fetch(without_tag, proven=True)).digest == adapter_digest(adapter)


async def test_a_tag_that_moves_during_the_fetch_gives_no_mixture(registry, fetch_setup, adapter, source, tmp_path):
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    registry.faults[blob_of(registry, "adapter_model.safetensors")] = BrokenConnection(
        after=20_000, then=lambda: registry.publish(REPOSITORY, "v1", changed)
    )
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    assert registry.manifests_asked == ["v1"]


@pytest.mark.parametrize("secret", ["username and password", "one registry", "docker login", "several"])
async def test_a_realm_gives_a_token_for_the_secret(  # noqa: PLR0917
    registry, fetch_setup, adapter, source, closed, secret
):
    entry = {"auth": basic(USER, PASSWORD).removeprefix("Basic ")}
    keys = {
        "username and password": {},
        "one registry": {".dockerconfigjson": docker_config(**{registry.host: entry})},
        "docker login": {".dockerconfigjson": docker_config(**{f"https://{registry.host}/v2/": entry})},
        "several": {
            ".dockerconfigjson": docker_config(
                **{
                    registry.host: {"username": "other", "password": "other"},
                    f"{registry.host}/{REPOSITORY}": {"username": USER, "password": PASSWORD},
                    "ghcr.io": {"username": "third", "password": "third"},
                }
            )
        },
    }[secret]
    assert (await fetch_setup.fetch(source, **closed(**keys))).digest == adapter_digest(adapter)
    asked = {one.path: one.headers.get("authorization", "") for one in registry.asked}
    assert asked.pop("/token") == basic(USER, PASSWORD)
    assert {one[:13] for one in asked.values()} == {"Bearer token-"}, "the password goes to the realm alone"
    assert len(registry.tokens) == 2, "the wrong one, empty, and one that opens"
    assert all(one.endswith("-repository:acme.pirate:pull") for one in registry.tokens if one)


async def test_a_token_that_ends_during_the_fetch_is_renewed(registry, fetch_setup, adapter, source, closed):
    registry.requests_per_token = 1
    assert (await fetch_setup.fetch(source, **closed())).digest == adapter_digest(adapter)


async def test_a_registry_that_asks_for_the_password_itself(registry, fetch_setup, adapter, source, closed):
    registry.scheme = "Basic"
    assert (await fetch_setup.fetch(source, **closed())).digest == adapter_digest(adapter)


@pytest.mark.parametrize("scheme", ["Basic", "Bearer"])
async def test_wrong_and_missing_secrets_are_told_apart_and_no_message_has_one(
    registry, fetch_setup, source, closed, scheme
):
    registry.scheme = scheme
    closed()
    none = await refused(fetch_setup, source, r"Secret.* in source\.credentialsSecretRef", manifest="none")
    assert "name one" in none.message or "Name a Secret" in none.message
    wrong = closed(username=USER, password=f"{PASSWORD}x")
    other = await refused(fetch_setup, source, r"the Secret in source\.credentialsSecretRef|accept the Secret", **wrong)
    for failure in (none, other):
        assert (failure.reason, "canary" in failure.message) == ("CredentialsInvalid", False)


async def test_a_secret_without_this_registry_says_so(registry, fetch_setup, source, closed):
    keys = {".dockerconfigjson": docker_config(**{"ghcr.io": {"username": USER, "password": PASSWORD}})}
    failure = await refused(fetch_setup, source, rf"no entry for {re.escape(registry.host)}\. Add", **closed(**keys))
    assert failure.reason == "CredentialsInvalid"
    assert registry.asked == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, r"answers 403: there is no such repository, or the Secret in source\.credentialsSecretRef is missing"),
        (404, r"^source\.image: the registry answers 404.*no such repository, tag or digest\. Correct the reference"),
        (429, r"the registry answers 429: it is asked too often"),
        (400, r"the registry answers 400"),
    ],
)
async def test_refusals_of_a_registry_say_what_to_do(registry, fetch_setup, source, status, words):
    registry.faults["/v2/acme/pirate/manifests/v1"] = ErrorStatus(status)
    failure = await refused(fetch_setup, source, words)
    assert failure.retry_after > 0
    assert len(registry.asked) == (5 if status == 429 else 1)


async def test_an_unknown_tag_and_a_layer_that_is_gone_are_named(registry, fetch_setup, source):
    await refused(fetch_setup, source.replace(":v1", ":v9"), r"404 for oci://\S+/acme/pirate:v9: it has no such")
    del registry.files[blob_of(registry, "adapter_model.safetensors")]
    await refused(fetch_setup, source, r"404 for adapter_model\.safetensors of oci://", manifest="b")


async def test_a_busy_registry_is_asked_again(registry, fetch_setup, adapter, source, closed):
    busy = ErrorStatus(429, times=2, headers=(("Retry-After", "0"),))
    registry.faults |= {"/v2/acme/pirate/manifests/v1": busy, blob_of(registry, "adapter_config.json"): busy}
    assert (await fetch_setup.fetch(source, **closed())).digest == adapter_digest(adapter)


async def test_a_registry_that_wants_a_long_wait_is_asked_by_a_later_fetch(registry, fetch_setup, source):
    """This one would count as stalled."""
    registry.faults["/v2/acme/pirate/manifests/v1"] = ErrorStatus(429, headers=(("Retry-After", "60"),))
    failure = await refused(fetch_setup, source, "the registry answers 429: it is asked too often")
    assert failure.retry_after > 30 * fetch_setup.scale
    assert len(registry.asked) == 1


async def test_a_broken_download_continues_where_it_broke(registry, fetch_setup, adapter, source):
    weights = blob_of(registry, "adapter_model.safetensors")
    registry.faults[weights] = BrokenConnection(after=20_000, times=3)
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    asked = [one.headers for one in registry.asked_for(weights)]
    assert [("range" in one, "if-range" in one) for one in asked] == [(False, False), *[(True, False)] * 3]
    assert registry.sent < 1.2 * sum(len(body) for body in registry.files.values()), "nothing twice"


async def test_files_of_an_earlier_attempt_are_not_asked_for_again(registry, fetch_setup, adapter, source):
    registry.faults[blob_of(registry, "adapter_model.safetensors")] = ErrorStatus(500)
    await refused(fetch_setup, source, "the registry answers 500")
    registry.faults.clear()
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    assert len(registry.asked_for(blob_of(registry, "adapter_config.json"))) == 1


async def test_bytes_of_another_layer_are_not_continued(registry, fetch_setup, source, tmp_path):
    weights = blob_of(registry, "adapter_model.safetensors")
    registry.faults[weights] = ShortBody(missing=100)
    await refused(fetch_setup, source, "cannot fetch")
    assert [path for path in fetch_setup.partial() if path.name == "adapter_model.safetensors.part"]
    registry.faults.clear()
    changed = write_adapter(tmp_path / "other", rank=512, seed=5)
    registry.publish(REPOSITORY, "v1", changed)
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(changed)


ANOTHER = r"^source\.image: adapter_\w+\.\w+ of oci://\S+ comes with another size or digest than its manifest says"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_layer_with_another_digest_is_not_taken(registry, fetch_setup, source, name):
    path = blob_of(registry, name)
    body = registry.files[path]
    registry.files[path] = body[:-1] + bytes([body[-1] ^ 1])
    failure = await refused(fetch_setup, source, ANOTHER)
    assert failure.retry_after > 0
    assert not [path for path in fetch_setup.partial() if path.name.startswith(f"{name}.part")]
    assert len(registry.asked_for(path)) == 1, "a large file is not fetched five times"


@pytest.mark.parametrize("more", [-7, 7])
async def test_a_layer_with_another_size_is_not_taken(registry, fetch_setup, adapter, more):
    def claim(manifest):
        manifest["layers"][1]["size"] += more

    source = registry.publish(REPOSITORY, "v1", adapter, claim)
    failure = await refused(fetch_setup, source, ANOTHER)
    assert failure.retry_after > 0


async def test_an_endless_layer_is_cut_at_its_size(registry, fetch_setup, source):
    registry.faults[blob_of(registry, "adapter_config.json")] = EndlessBody()
    await refused(fetch_setup, source, ANOTHER)
    assert registry.sent < 64 << 20


async def test_a_registry_that_hangs_is_given_up(registry, fetch_setup, source):
    fetch_setup.settings["fetch_stall_seconds"] = 20
    registry.faults["/v2/acme/pirate/manifests/v1"] = SlowBody(every=0.2)
    failure = await refused(fetch_setup, source, r"oci://\S+ gave \d+ bytes in \d+ s, which is too slow")
    assert failure.retry_after > 0


async def test_compressed_answers_are_refused_unopened(registry, fetch_setup, source):
    weights = blob_of(registry, "adapter_model.safetensors")
    registry.faults[weights] = GzipBody(b"x" * len(registry.files[weights]))
    await refused(fetch_setup, source, r"adapter_model\.safetensors of oci://\S+ is sent compressed")


async def test_weights_beyond_what_the_pool_admits_are_not_asked_for(registry, fetch_setup, source):
    failure = await refused(fetch_setup, source, "fetches at most 1000", max_bytes=1000)
    assert failure.reason == "TooLarge"
    assert len(registry.asked) == 1


async def test_an_artifact_with_only_a_pickle_is_refused_with_advice(registry, fetch_setup, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    await refused(fetch_setup, registry.publish(REPOSITORY, "v1", adapter), r"has adapter_model\.bin but no")


async def test_blobs_come_from_another_host_without_the_token(  # noqa: PLR0917
    registry, fetch_setup, adapter, source, closed, tmp_path
):
    async with web_server(tmp_path, "127.0.0.3") as other:
        both = tmp_path / "both.pem"
        both.write_bytes(registry.ca_file.read_bytes() + other.ca_file.read_bytes())
        fetch_setup.settings |= {"fetch_allowed_hosts": ["127.0.0.1", "127.0.0.3"], "fetch_ca_file": str(both)}
        other.files, registry.blobs_at = registry.files, other.base
        assert (await fetch_setup.fetch(source, **closed())).digest == adapter_digest(adapter)
        assert len(other.asked) == 2
        assert not [one for one in other.asked if "authorization" in one.headers]


async def test_the_host_of_a_blob_gets_no_password_for_a_realm_of_its_own(
    registry, fetch_setup, source, closed, tmp_path
):
    async with registry_server(tmp_path, "127.0.0.3") as other:
        both = tmp_path / "both.pem"
        both.write_bytes(registry.ca_file.read_bytes() + other.ca_file.read_bytes())
        fetch_setup.settings |= {"fetch_allowed_hosts": ["127.0.0.0/24"], "fetch_ca_file": str(both)}
        other.users["me"], registry.blobs_at = "x", other.base
        failure = await refused(
            fetch_setup, source, r"127\.0\.0\.3, to which the registry redirects, answers 401\.", **closed()
        )
        assert failure.reason != "CredentialsInvalid"
        assert failure.retry_after > 0
        assert [(one.path[:4], "authorization" in one.headers) for one in other.asked] == [("/v2/", False)]


@pytest.mark.parametrize("what", ["blob", "manifest", "realm"])
async def test_row_33_nothing_leads_to_a_private_address(  # noqa: PLR0917
    registry, fetch_setup, source, closed, tmp_path, what
):
    async with web_server(tmp_path, "127.0.0.2") as inside:
        if what == "realm":
            registry.realm = inside.url("/token")
        path = "/v2/acme/pirate/manifests/v1" if what == "manifest" else blob_of(registry, "adapter_config.json")
        if what != "realm":
            registry.faults[path] = ErrorStatus(307, headers=(("Location", inside.url("/x")),))
        failure = await refused(
            fetch_setup, source, r"leads to 127\.0\.0\.2, which is not a public.*FETCH_ALLOWED_HOSTS", **closed()
        )
        assert failure.retry_after == 0
        assert inside.asked == []


async def test_row_33_a_registry_at_a_private_address_is_the_platforms_to_allow(registry, fetch_setup, source):
    fetch_setup.settings["fetch_allowed_hosts"] = []
    await refused(fetch_setup, source, r"leads to 127\.0\.0\.1, which is not a public address.*FETCH_ALLOWED_HOSTS")
    assert registry.asked == []


async def test_a_realm_redirects_without_the_password(registry, fetch_setup, source, closed, tmp_path):
    async with web_server(tmp_path, "127.0.0.3") as other, registry_server(tmp_path, "127.0.0.4") as realm:
        trusted = tmp_path / "all.pem"
        trusted.write_bytes(b"".join(server.ca_file.read_bytes() for server in (registry, other, realm)))
        fetch_setup.settings |= {"fetch_allowed_hosts": ["127.0.0.0/24"], "fetch_ca_file": str(trusted)}
        registry.realm = realm.url("/login")
        realm.faults["/login"] = ErrorStatus(307, headers=(("Location", other.url("/token")),))
        other.files["/token"] = b'{"token": "x"}'
        await refused(fetch_setup, source, "there is no such repository, or the Secret in", **closed())
        assert realm.asked[0].headers["authorization"] == basic(USER, PASSWORD), "the realm gets it, whatever its host"
        assert len(other.asked) == 1
        assert "authorization" not in other.asked[0].headers


@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [
        (403, r"answers 403 and does not accept the Secret in source\.credentialsSecretRef", "CredentialsInvalid"),
        (404, r"^source\.image: 127\.0\.0\.1, which gives the registry's tokens, answers 404 for oci://", ""),
        (503, r"cannot fetch oci://\S+: 127\.0\.0\.1, which gives the registry's tokens, answers 503", ""),
    ],
)
async def test_refusals_of_a_realm_name_it(  # noqa: PLR0917
    registry, fetch_setup, source, closed, status, words, reason
):
    registry.faults["/token"] = ErrorStatus(status)
    failure = await refused(fetch_setup, source, words, **closed())
    assert failure.reason == reason
    assert failure.retry_after > 0


@pytest.mark.parametrize(
    "realm", ["http://127.0.0.1/token", "file:///etc/passwd", "token", "https://", "https:///t", "https://[bad/t"]
)
async def test_an_odd_realm_is_refused(registry, fetch_setup, source, closed, realm):
    registry.realm = realm
    words = r"^source\.image: the registry of oci://\S+ has no realm with https:// and a host\. Name another one"
    await refused(fetch_setup, source, words, **closed())
    assert {one.path for one in registry.asked} == {"/v2/acme/pirate/manifests/v1"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"token": 7}', b'{"token": "a\\nb"}', b"x" * (1 << 20)])
async def test_a_realm_that_sends_no_token_is_named(registry, fetch_setup, source, closed, body):
    registry.token_body = body
    failure = await refused(
        fetch_setup, source, r"127\.0\.0\.1, which gives the registry's tokens, did not", **closed()
    )
    assert failure.retry_after > 0


async def test_an_index_names_one_artifact_beside_container_images(registry, fetch_setup, adapter, source):
    image = container_image(registry, "image")
    inner = registry.put_index(REPOSITORY, "inner", [image, registry.digest(REPOSITORY, "v1")])
    registry.put_index(REPOSITORY, "all", [image, inner, image])
    assert (await fetch_setup.fetch(source.replace(":v1", ":all"))).digest == adapter_digest(adapter)
    registry.publish(REPOSITORY, "v2", write_adapter(adapter, seed=5))
    registry.put_index(REPOSITORY, "two", [registry.digest(REPOSITORY, tag) for tag in ("v1", "v2")])
    two = source.replace(":v1", ":two")
    with pytest.raises(AdapterFetchFailed, match=r"is an index of 2 artifacts\. Name one of them by its digest"):
        await fetch_setup.fetch(two)


async def test_an_index_names_an_artifact_once_if_another_index_names_it_too(registry, fetch_setup, adapter, source):
    one = registry.digest(REPOSITORY, "v1")
    inner = registry.put_index(REPOSITORY, "inner", [one])
    registry.put_index(REPOSITORY, "all", [one, inner, registry.put_index(REPOSITORY, "other", [one, inner])])
    assert (await fetch_setup.fetch(source.replace(":v1", ":all"))).digest == adapter_digest(adapter)
    assert len(registry.manifests_asked) == len({*registry.manifests_asked}) == 4


def container_image(registry, tag):
    def config(manifest):
        manifest["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json"

    layer = registry.layer(REPOSITORY, tag.encode(), "", mediaType="application/vnd.oci.image.layer.v1.tar+gzip")
    del layer["annotations"]
    registry.put_manifest(REPOSITORY, tag, [layer], config)
    return registry.digest(REPOSITORY, tag)


async def test_indexes_are_read_only_so_deep_and_so_wide(registry, fetch_setup, source):
    digest = registry.digest(REPOSITORY, "v1")
    for _ in range(3):
        digest = registry.put_index(REPOSITORY, "deep", [digest])
    await refused(fetch_setup, source.replace(":v1", ":deep"), r"has indexes more than 2 deep\. Name the manifest")
    assert len(registry.asked) == 3

    several = [container_image(registry, f"image{number}") for number in range(MAX_MANIFESTS + 1)]
    registry.put_index(REPOSITORY, "wide", several)
    await refused(fetch_setup, source.replace(":v1", ":wide"), "is an index with more than 16 manifests", manifest="b")

    registry.asked.clear()
    halves = [registry.put_index(REPOSITORY, "half", several[at : at + 9]) for at in (0, 8)]
    registry.put_index(REPOSITORY, "tree", halves)
    await refused(
        fetch_setup, source.replace(":v1", ":tree"), "has more than 16 manifests in its indexes", manifest="c"
    )
    assert len(registry.asked) == MAX_MANIFESTS


async def test_an_ordinary_container_image_is_refused_as_one(registry, fetch_setup, source):
    image = container_image(registry, "image")
    await refused(
        fetch_setup,
        source.replace(":v1", f"@{image}"),
        r"^source\.image: oci://\S+ is a container image, not an artifact.*with oras push",
    )
    registry.put_index(REPOSITORY, "images", [image])
    await refused(fetch_setup, source.replace(":v1", ":images"), "is a container image", manifest="b")


async def test_a_manifest_of_another_digest_is_not_taken(registry, fetch_setup, source, adapter):
    digest = registry.digest(REPOSITORY, "v1")
    registry.files[f"/v2/acme/pirate/manifests/{digest}"] += b" "
    failure = await refused(fetch_setup, source.replace(":v1", f"@{digest}"), rf"sends a manifest .* for {digest}")
    assert failure.retry_after > 0


PAGES = [b"<html>closed for today</html>", b"[]", b'{"mediaType": "text/html"}']


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_in_place_of_a_tags_manifest_passes(registry, fetch_setup, source, adapter, page):
    path = "/v2/acme/pirate/manifests/v1"
    manifest, registry.files[path] = registry.files[path], page
    failure = await refused(fetch_setup, source, r"It may be a passing answer: Motet tries again automatically\.$")
    assert 0 < failure.retry_after < RETRY_LATER_SECONDS * fetch_setup.scale / 2
    registry.files[path] = manifest
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)


@pytest.mark.parametrize("page", [*PAGES, b'{"mediaType": "application/vnd.oci.image.manifest.v1+json"}'])
async def test_what_a_digest_names_stays_wrong(registry, fetch_setup, source, page):
    digest = registry.put_document(REPOSITORY, page)
    failure = await refused(
        fetch_setup,
        source.replace(":v1", f"@{digest}"),
        r"\. After a push, name the new digest: this one always names the same bytes\.$",
    )
    assert (failure.reason, failure.retry_after) == ("FormatRejected", 0)


@pytest.mark.parametrize("wrong", ["no layers", "tar", "packing", "in an index"])
async def test_a_tag_with_a_wrong_artifact_is_read_again_later(registry, fetch_setup, source, adapter, wrong):
    if wrong == "no layers":
        registry.put_manifest(REPOSITORY, "v1", [], lambda manifest: manifest.update(layers=None))
    elif wrong == "in an index":
        registry.put_index(REPOSITORY, "v1", [registry.put_document(REPOSITORY, PAGES[0])])
    else:
        model_pack(registry, adapter, "tar" if wrong == "tar" else "tar+gzip")
    failure = await refused(fetch_setup, source, r"\. Motet reads the tag again automatically\.$")
    assert failure.reason == "FormatRejected"
    assert failure.retry_after > RETRY_LATER_SECONDS * fetch_setup.scale / 2
    registry.publish(REPOSITORY, "v1", adapter)
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)


@pytest.mark.parametrize("endless", [False, True])
async def test_a_manifest_is_read_only_so_far(registry, fetch_setup, source, endless):
    path = "/v2/acme/pirate/manifests/v1"
    registry.files[path] = registry.files[path] + b" " * MAX_MANIFEST_BYTES
    if endless:
        registry.faults[path] = EndlessBody()
    await refused(fetch_setup, source, r"has a manifest of more than 4194304 bytes\. Push only")
    assert registry.sent < 64 << 20


async def test_too_many_layers_are_refused(registry, fetch_setup, source):
    layers = [registry.layer(REPOSITORY, b"x", f"{number}.txt") for number in range(MAX_LAYERS + 1)]
    registry.put_manifest(REPOSITORY, "many", layers)
    await refused(fetch_setup, source.replace(":v1", ":many"), r"has more than 1000 layers\. Push only")


def tarred(name, body, *more, kind=tarfile.REGTYPE):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.type, entry.linkname = (len(body) if kind == tarfile.REGTYPE else 0), kind, "/etc/passwd"
        tar.addfile(entry, io.BytesIO(body))
        for other in more:
            tar.addfile(tarfile.TarInfo(other))
    return out.getvalue()


def model_pack(registry, adapter, packing, pack=lambda path: path.read_bytes()):
    layers = []
    for path in sorted(adapter.iterdir()):
        kind = "weight.config" if path.suffix == ".json" else "weight"
        layer = registry.layer(REPOSITORY, pack(path), "", mediaType=f"application/vnd.cncf.model.{kind}.v1.{packing}")
        layers.append(layer | {"annotations": {"org.cncf.model.filepath": path.name}})

    def kinds(manifest):
        manifest["artifactType"] = "application/vnd.cncf.model.manifest.v1+json"
        manifest["config"]["mediaType"] = "application/vnd.cncf.model.config.v1+json"

    return registry.put_manifest(REPOSITORY, "v1", layers, kinds)


async def test_a_model_pack_has_its_files_as_they_are(registry, fetch_setup, adapter):
    assert (await fetch_setup.fetch(model_pack(registry, adapter, "raw"))).digest == adapter_digest(adapter)


async def test_a_model_pack_has_each_file_in_a_tar(registry, fetch_setup, adapter):
    source = model_pack(registry, adapter, "tar", lambda path: tarred(path.name, path.read_bytes()))
    room = sum(path.stat().st_size for path in adapter.iterdir()) + 20_480
    fetched = await fetch_setup.fetch(source, max_bytes=room)
    assert fetched.digest == adapter_digest(adapter)


def opened_with(answer):
    """An artifact of a registry that answers so."""
    order = FetchOrder(
        what="adapter",
        uri="oci://ghcr.io/a:v1",
        into="",
        max_bytes=1 << 20,
        stall_seconds=1,
        min_average_bytes_per_second=1,
    )
    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    opening = Opening(order=order, secret=NO_CREDENTIALS, client=client, on_checked=lambda _: None, need=lambda *_: 0)
    return parse(order.uri, "").open(opening)


def test_a_tar_whose_unpacking_broke_is_fetched_again(monkeypatch, tmp_path):
    body = tarred("adapter_model.safetensors", b"weights" * 1000)
    layer = {"mediaType": "application/vnd.cncf.model.weight.v1.tar", "digest": digest_of(body), "size": len(body)}
    layer["annotations"] = {"org.cncf.model.filepath": "adapter_model.safetensors"}
    manifest = json.dumps({"mediaType": MANIFEST, "layers": [layer]}).encode()
    asked = []

    def answer(request):
        asked.append(request.url.path)
        return httpx2.Response(200, content=iter([manifest if "/manifests/" in request.url.path else body]))

    opened = opened_with(answer)
    assert opened.revision == digest_of(manifest)

    def breaks(path, *_):
        path.write_bytes(body[512:] + bytes(512))  # of the same size
        raise OSError(5, "Input/output error")

    wanted = WantedFile("adapter_model.safetensors", 1 << 20)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr("motet_runner.sources.oci_artifact.unpack", breaks)
        opened.fetch(wanted, tmp_path)
    for _ in range(2):
        assert opened.fetch(wanted, tmp_path)
        assert (tmp_path / wanted.name).read_bytes() == b"weights" * 1000
    assert len(asked) == 1 + 2, "what is unpacked is not fetched again"


@pytest.mark.parametrize("limit", [6999, 100])
def test_a_file_of_a_tar_is_not_larger_than_its_limit(limit, tmp_path):
    """Whether it is unpacked now or was before."""
    body = tarred("adapter_config.json", b"weights" * 1000)
    layer = {"mediaType": "application/vnd.cncf.model.weight.v1.tar", "digest": digest_of(body), "size": len(body)}
    layer["annotations"] = {"org.cncf.model.filepath": "adapter_config.json"}
    manifest = json.dumps({"mediaType": MANIFEST, "layers": [layer]}).encode()

    def answer(request):
        return httpx2.Response(200, content=iter([manifest if "/manifests/" in request.url.path else body]))

    opened = opened_with(answer)
    for _ in range(2):
        with pytest.raises(AdapterFetchFailed, match=f"has 7000 bytes, but Motet fetches at most {limit}") as failed:
            opened.fetch(WantedFile("adapter_config.json", limit), tmp_path)
        assert failed.value.reason == "TooLarge"
        assert opened.fetch(WantedFile("adapter_config.json", 7000), tmp_path)


async def test_a_tar_that_was_unpacked_before_the_fetch_broke_is_not_asked_for_again(registry, fetch_setup, adapter):
    source = model_pack(registry, adapter, "tar", lambda path: tarred(path.name, path.read_bytes()))
    config, weights = (one["digest"] for one in json.loads(registry.files["/v2/acme/pirate/manifests/v1"])["layers"])
    registry.faults[f"/v2/acme/pirate/blobs/{weights}"] = ErrorStatus(500)
    await refused(fetch_setup, source, "the registry answers 500")
    registry.faults.clear()
    assert (await fetch_setup.fetch(source)).digest == adapter_digest(adapter)
    assert len(registry.asked_for(config)) == 1


@pytest.mark.parametrize(
    ("packing", "pack", "words"),
    [
        ("tar+gzip", lambda path: b"x", r"is packed as 'tar\+gzip'\. Push it as it is"),
        ("tar", lambda path: b"no tar" * 200, "is no whole tar"),
        ("tar", lambda path: tarred(f"../{path.name}", b"{}"), r"has no file adapter_config\.json"),
        ("tar", lambda path: tarred(path.name, b"", kind=tarfile.SYMTYPE), "has a link"),
        ("tar", lambda path: tarred(path.name, b"{}", "second"), "has several files"),
    ],
    ids=["gzip", "noise", "traversal", "link", "two files"],
)
async def test_a_layer_that_is_packed_otherwise_is_refused(  # noqa: PLR0917
    registry, fetch_setup, adapter, packing, pack, words
):
    failure = await refused(fetch_setup, model_pack(registry, adapter, packing, pack), words)
    assert failure.message.startswith("source.image: ")
    assert failure.reason == "FormatRejected"


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("oci://ghcr.io/acme/pirate:v1", ("https://ghcr.io/v2/acme/pirate/", "v1", "")),
        ("oci://docker.io/acme/pirate:V_1.0-x", ("https://registry-1.docker.io/v2/acme/pirate/", "V_1.0-x", "")),
        (f"oci://reg:5000/a@sha256:{DIGITS}", ("https://reg:5000/v2/a/", "", f"sha256:{DIGITS}")),
        (f"oci://localhost/a/b/c:t@sha256:{DIGITS}", ("https://localhost/v2/a/b/c/", "t", f"sha256:{DIGITS}")),
        ("oci://10.0.0.1:5000/a_b/c__d/e-f.g:1", ("https://10.0.0.1:5000/v2/a_b/c__d/e-f.g/", "1", "")),
    ],
)
def test_a_reference_names_registry_repository_and_tag_or_digest(uri, parts):
    found = parse(uri, "")
    assert isinstance(found, OciUri)
    assert (found.url, found.tag, found.digest) == parts


@pytest.mark.parametrize(
    "image",
    [
        "",
        "ghcr.io",
        "ghcr.io/acme",
        "acme/pirate:v1",
        "ghcr.io/acme/pirate:",
        "ghcr.io/acme/Pirate:v1",
        "ghcr.io/../pirate:v1",
        "ghcr.io/acme//pirate:v1",
        "ghcr.io/acme/pirate:.v1",
        f"ghcr.io/acme/pirate:{'v' * 129}",
        "ghcr.io/acme/pirate@sha256:12",
        f"ghcr.io/acme/pirate@sha512:{DIGITS}",
        f"ghcr.io/acme/pirate@sha256:{DIGITS}:v1",
        "ghcr.io/acme/pirate:v1?x",
        "ghcr.io:port/acme/pirate:v1",
        "https://ghcr.io/acme/pirate:v1",
    ],
)
def test_other_references_are_refused_at_every_door(image):
    with pytest.raises(AdapterFetchFailed, match=r"^source\.image: .* must name a registry, a repository in it"):
        parse(f"oci://{image}", "")
    text = (
        "apiVersion: motet.dev/v1alpha1\nkind: LoRAAdapter\nmetadata: {name: a}\nspec:\n  poolRef: {name: p}\n"
        f"  source: {{image: '{image}'}}\n"
    )
    (problem,) = read_text(text, file="f").problems
    assert problem.message.startswith("must name a registry, a repository in it, and a tag or a digest, as ghcr.io/")


async def test_the_manifest_of_the_guide_is_fetched(registry, fetch_setup, adapter, tmp_path):
    page = (ROOT / "docs/guides/adapters.md").read_text()
    (text,) = re.findall(
        r"^```yaml\n(.*?)^```$", page.split("## Serve one from a registry")[1], re.MULTILINE | re.DOTALL
    )
    read = read_text(text, file="page.yaml")
    assert not read.problems
    declared, secret = (manifest.resource for manifest in read.manifests)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/page.yaml").write_text(text)
    fetch_setup.settings["manifests"] = str(tmp_path / "manifests")
    registry.users[secret.string_data["username"]] = secret.string_data["password"]
    source = declared.spec.source
    host, _, rest = source.address.removeprefix("oci://").partition("/")
    registry.publish(*rest.split(":"), adapter)
    named = f"{declared.metadata.namespace}/{source.credentials_secret_ref.name}"
    fetched = await fetch_setup.fetch(source.address.replace(host, registry.host), credentials=named)
    assert fetched.digest == adapter_digest(adapter)
