"""Each source is declared once, and every door reads that: schema, rules, operator, runner, Secrets and pages."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from motet.errors import AdapterFetchFailed
from motet.resources import ServingPool, read_text
from motet.resources.crd import ADAPTER, POOL, CustomResource, object_schema
from motet.resources.source_uris import URI_SENTENCE, told
from motet.resources.validation_rules import VALIDATIONS
from motet.sources import (
    ADAPTER_SOURCES,
    DOCKER_CONFIG,
    FOLDER,
    MODEL_SOURCES,
    NOT_SECRET,
    READABLE,
    SOURCES,
    SecretKeys,
    Source,
    declared,
    folder_of,
)
from motet_operator.cluster.decision import NO_FILES
from motet_operator.cluster.object_parser import model_uri
from motet_operator.local.manifest_folder import absolute_uri
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.folder import FolderUri
from motet_runner.sources.secret import SourceCredentials, read_credentials
from motet_runner.sources.uri import parse
from testbed.tree import ROOT
from tools.reference.resource_pages import manifests_page

TABLE = ROOT / "services/common/motet/sources.py"
every_source = pytest.mark.parametrize("one", SOURCES.values(), ids=SOURCES)
every_source_with_secrets = pytest.mark.parametrize(
    "one", [one for one in READABLE if one.secrets], ids=[one.scheme for one in READABLE if one.secrets]
)
KINDS = [(ADAPTER, "source", ADAPTER_SOURCES), (POOL, "model", MODEL_SOURCES)]


@cache
def fields(kind: CustomResource, part: str) -> dict[str, Any]:
    return object_schema(kind)["properties"]["spec"]["properties"][part]


def complaints(part: str, **given: Any) -> str:
    """What `motet up` says of a manifest with this source or model."""
    spec = {"poolRef": {"name": "p"}, "source": given} if part == "source" else {"model": given}
    kind = ADAPTER.name if part == "source" else POOL.name
    manifest = {"apiVersion": "motet.dev/v1alpha1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}
    return " ".join(problem.message for problem in read_text(yaml.safe_dump(manifest), file="f").problems)


def secret(folder: Path, **data: str) -> NetworkAccess:
    text = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": "t"}, "stringData": data}
    (folder / "secret.yaml").write_text(yaml.safe_dump(text))
    return NetworkAccess(manifests=str(folder))


def refused_by_runner(uri: str) -> str:
    with pytest.raises(AdapterFetchFailed) as refused:
        parse(uri)
    return refused.value.message


@every_source
def test_schema_and_rules_know_it(one: Source) -> None:
    for kind, part, known in KINDS:
        schema = fields(kind, part)
        rules = {rule["message"]: rule["rule"] for rule in schema["properties"]["uri"][VALIDATIONS]}
        (use,) = [message for message in rules if message.startswith("must begin with")]
        (schemes,) = re.findall(r"'\^\((.*)\)://'", rules[use])
        described = f"`{one.prefix}" in schema["properties"]["uri"]["description"]
        assert {one.prefix in use, one.scheme in schemes.split("|"), described} == {one in known}
        if one.form and one in known:
            assert f"'^{one.prefix}{one.form}$'" in rules[one.form_message]
        for field, allowed in [("revision", one.revisions), ("credentialsSecretRef", bool(one.secrets))]:
            (rule,) = [rule["rule"] for rule in schema[VALIDATIONS] if rule.get("fieldPath") == f".{field}"]
            listed = f"self.uri.startsWith('{one.prefix}')" in rule
            others = re.search(r"!\(?self\.uri", rule) is not None  # it lists those that may not
            assert (listed != others) == allowed if one in known else not listed
    schemes = fields(POOL, "admission")["properties"]["allowedSchemes"]["items"]["enum"]
    assert (one.scheme in schemes) == (one in ADAPTER_SOURCES)


@every_source
def test_offline_validation_knows_it(one: Source) -> None:
    for _, part, known in KINDS:
        if one not in known:
            assert "must begin with" in complaints(part, uri=one.example)
            continue
        assert not complaints(part, uri=one.example)
        assert bool(complaints(part, uri=one.example, revision="v1")) != one.revisions
        assert bool(complaints(part, uri=one.example, credentialsSecretRef={"name": "key"})) != bool(one.secrets)
        if one.form:
            assert one.form_message in complaints(part, uri=one.prefix + "/")


@every_source
def test_operator_and_motet_up_hand_it_to_the_runner(one: Source) -> None:
    assert (one.scheme in NO_FILES) == (one in ADAPTER_SOURCES and not one.network)
    assert all((one.prefix in use) == (one in ADAPTER_SOURCES and one.network) for use in NO_FILES.values())
    spec = {"metadata": {"name": "p"}, "spec": {"model": {"uri": one.example}}}
    if one in MODEL_SOURCES:
        in_cluster = model_uri(ServingPool.model_validate(spec))
        locally = absolute_uri(one.example, manifest="/m/pool.yaml")
        assert [parse(in_cluster), parse(locally)]
        assert (in_cluster == locally == one.example) or not one.network


@every_source
def test_the_runner_parses_it(one: Source) -> None:
    if one in READABLE:
        assert isinstance(parse(one.example), FolderUri) != one.network
    else:
        assert f"must begin with {READABLE[0].prefix}" in refused_by_runner(one.example)


def keys_of(one: Source, keys: SecretKeys) -> tuple[dict[str, str], dict[str, str]]:
    """What a Secret has, and what the runner takes from it. Each secret value ends with -7."""
    if keys == DOCKER_CONFIG:
        taken = {"username": "username-7", "password": "password-7"}
        host = one.example.removeprefix(one.prefix).partition("/")[0]
        return {keys[0]: json.dumps({"auths": {host: taken}}, indent=1)}, taken
    values = {key: f"{key}-7" for key in keys}
    return values, values


def read(one: Source, access: NetworkAccess) -> SourceCredentials:
    return read_credentials("t/key", access, one.secrets, one.secret_options, timeout=1, uri=one.example)


@every_source_with_secrets
def test_a_secret_has_its_keys(one: Source, tmp_path: Path) -> None:
    for keys in one.secrets:
        given, taken = keys_of(one, keys)
        assert read(one, secret(tmp_path, **given, other="x")).values == taken
        for option in one.secret_options:
            assert read(one, secret(tmp_path, **given, **{option: "option-7"}, other="x")).values == taken | {
                option: "option-7"
            }
    for option in sorted(NOT_SECRET & set(one.secret_options)):
        alone = {option: "option-7"}
        assert read(one, secret(tmp_path, **alone, other="x")).values == alone
    with pytest.raises(AdapterFetchFailed, match=".*".join(key for keys in one.secrets for key in keys)):
        read(one, secret(tmp_path, **dict.fromkeys(one.secret_options, "x")))


def test_what_is_secret_is_in_no_message(tmp_path: Path) -> None:
    for one in READABLE:
        for keys in one.secrets:
            given, values = keys_of(one, keys)
            options = {key: f"{key}-7" for key in one.secret_options}
            found = read(one, secret(tmp_path, **given, **options))
            told_of = {key for key, value in (values | options).items() if value in found.scrub(f"it says {value}!")}
            assert told_of == (values | options).keys() & NOT_SECRET


def test_a_source_that_takes_no_secret_refuses_one(tmp_path: Path) -> None:
    with pytest.raises(AdapterFetchFailed, match=r"^source\.credentialsSecretRef: this source takes no Secret"):
        read_credentials("t/key", secret(tmp_path, token="x"), (), timeout=1)
    assert not read_credentials("", secret(tmp_path, token="x"), (), timeout=1).values


@every_source
def test_the_reference_names_it(one: Source) -> None:
    (row,) = [line for line in manifests_page().splitlines() if line.startswith(f"| `{one.example}`")]
    assert f"| {told(one.secrets, one.secret_options)} |" in row
    assert all(f"`{key}`" in row for keys in (*one.secrets, one.secret_options) for key in keys)


@pytest.mark.parametrize("scheme", ["ftp", "docker"])
def test_an_unknown_scheme_gets_the_same_sentence_at_every_door(scheme: str) -> None:
    uri = f"{scheme}://me:geheim@host/a"
    for kind, part, known in KINDS:
        said = complaints(part, uri=f"{scheme}://host/a")
        assert said.endswith(known[-1].prefix)
        assert said in [rule["message"] for rule in fields(kind, part)["properties"]["uri"][VALIDATIONS]]
    of_runner = refused_by_runner(uri)
    assert f": {complaints('source', uri=f'{scheme}://host/a')}." in of_runner
    assert "geheim" not in of_runner


HIDDEN = (
    "hf://me:geheim@org/name",
    "hf://me:1/geheim@org/name",
    "hf:me:geheim@org/name",
    "https://me:geheim@host/a/",
    "https://me:geheim",
    "https://me:geheim/a@host/",
    "https://[geheim]/a/",
    "file://me:geheim@host/a",
    "file:me:geheim@host/a",
    "pvc://me:geheim@claim/a",
    "s3://me:geheim@bucket/a",
    "s3://me:geheim/bucket/a",
    "oci://me:geheim@ghcr.io/acme/pirate:v1",
    "oci://me@ghcr.io/acme/pirate:geheim",
    "oci://me:geheim/acme/pirate:v1",
)


@pytest.mark.parametrize("uri", HIDDEN)
def test_no_message_repeats_what_may_be_a_password(uri: str) -> None:
    assert "geheim" not in refused_by_runner(uri)
    assert "geheim" not in complaints("source", uri=uri) + complaints("model", uri=uri)


@pytest.mark.parametrize("character", ["\0", "\x01", "\t", "\n", "\x1b", "\x7f"], ids=ascii)
@every_source
def test_no_uri_has_a_control_character(one: Source, character: str) -> None:
    """Python's own functions raise ValueError for some of them, and drop others without a word."""
    name = one.example.rstrip("/")
    uri = f"{name[:-1]}{character}{name[-1]}{one.example[len(name) :]}"
    for _, part, _ in KINDS:
        assert URI_SENTENCE in complaints(part, uri=uri)
    if one in READABLE:
        for written in (uri, uri.replace(character, quote(character))):
            assert refused_by_runner(written).startswith("source.uri: must have no control characters")


def test_a_folder_may_have_an_at_sign() -> None:
    assert parse("file:///models/@new") == FolderUri(Path("/models/@new"))


def test_two_sources_for_one_scheme_are_refused_at_import() -> None:
    text = TABLE.read_text()
    for twice in (
        text.replace("    CLAIM,\n", "    CLAIM,\n    CLAIM,\n"),
        text.replace('scheme="s3"', 'scheme="pvc"'),
    ):
        assert twice != text
        with pytest.raises(ValueError, match=r"^Two sources have the scheme pvc://; remove one of them"):
            exec(compile(twice, "sources.py", "exec"), {"__name__": "motet.a_copy"})
    with pytest.raises(ValueError, match="file://"):
        declared(FOLDER, FOLDER)


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("file:///a%20b", "/a b"),
        ("file:/a", "/a"),
        ("file://localhost/a", "/a"),
        ("file://elsewhere/a", None),
        ("file://a", None),
        ("https://h/a/", None),
        ("/a", None),
    ],
)
def test_a_uri_names_a_folder_of_this_machine(uri: str, folder: str | None) -> None:
    assert folder_of(uri) == (None if folder is None else Path(folder))
