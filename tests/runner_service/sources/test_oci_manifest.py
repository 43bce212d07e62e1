"""Manifests that no good registry has."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_runner.sources.oci_manifest import INDEX, MANIFEST, MODEL_PATH, TITLE, Layer, NotAnArtifact, read

DIGEST = f"sha256:{'0' * 64}"


def layer(name: object = "x", **more: Any) -> dict[str, Any]:
    return {"mediaType": "any/thing", "digest": DIGEST, "size": 7, "annotations": {TITLE: name}} | more


def manifest(*layers: Any, **more: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers} | more).encode()


def index(*entries: Any) -> bytes:
    return json.dumps({"mediaType": INDEX, "manifests": entries}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "is no JSON object"),
        (b"[]", "is no JSON object"),
        (b"[" * 100_000, "is no JSON object"),
        (b"{}", r"of the type 'text/html'\. Push it as an OCI artifact"),
        (b'{"mediaType": ["x"]}', "of the type"),
        (
            b'{"mediaType": "application/vnd.oci.artifact.manifest.v1+json"}',
            "of the type 'application/vnd.oci.artifact",
        ),
        (manifest(layers=None), "without layers"),
        (manifest("x"), f"has no {TITLE} at layer 1"),
        (manifest(layer(), layer(annotations=None)), f"has no {TITLE} at layer 2"),
        (manifest(layer(7)), f"has no {TITLE} at layer 1"),
        (manifest(layer("../adapter_config.json")), r"names a file '\.\./adapter_config\.json' at layer 1"),
        (manifest(layer("/etc/passwd")), "names a file '/etc/passwd'"),
        (manifest(layer("a/../b")), "names a file"),
        (manifest(layer("..")), "names a file"),
        (manifest(layer(".")), "names a file"),
        (manifest(layer("a/")), "names a file"),
        (manifest(layer("a\\b")), "names a file"),
        (manifest(layer("a\nb")), r"names a file 'a\\nb'"),
        (manifest(layer("a\0b")), "names a file"),
        (manifest(layer("a" * 256)), "names a file 'aaa"),
        (manifest(layer("a" * 100_000)), "names a file 'aaa"),
        (manifest(layer("x"), layer("x")), r"two layers of the name 'x'\. Push each file once"),
        (manifest(layer(digest="md5:1")), "gives layer 1 no sha256 digest"),
        (manifest(layer(digest=f"{DIGEST}/../x")), "gives layer 1 no sha256 digest"),
        (manifest(layer(digest=7)), "gives layer 1 no sha256 digest"),
        (manifest(layer(size=-1)), "gives layer 1 a size that makes no sense"),
        (manifest(layer(size=1 << 60)), "gives layer 1 a size that makes no sense"),
        (manifest(layer(size=True)), "gives layer 1 a size that makes no sense"),
        (manifest(layer(size=7.0)), "gives layer 1 a size that makes no sense"),
        (manifest(layer("pirate/adapter_config.json")), "has its files in folders"),
        (manifest(layer("pirate", annotations={TITLE: "a", "io.deis.oras.content.unpack": "true"})), "in folders"),
        (index(), "without manifests"),
        (index("x"), "gives a manifest of its index no sha256 digest"),
        (index({"digest": f"{DIGEST}/"}), "gives a manifest of its index no sha256 digest"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said_in_one_line(body, words):
    with pytest.raises(NotAnArtifact, match=words) as wrong:
        read(body, "text/html; charset=utf-8")
    assert "\n" not in str(wrong.value)
    assert len(str(wrong.value)) < 250


def test_the_type_may_be_in_the_header_alone():
    body = json.dumps({"layers": [layer()], "manifests": []}).encode()
    assert read(body, f"{MANIFEST}; charset=utf-8") == {"x": Layer(DIGEST, 7)}


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("application/vnd.oci.image.layer.v1.tar", ""),
        ("application/vnd.oci.image.layer.v1.tar+gzip", ""),
        ("application/octet-stream", ""),
        (None, ""),
        (7, ""),
        ("application/vnd.cncf.model.weight.v1.raw", ""),
        ("application/vnd.cncf.model.weight.v1.tar", "tar"),
        ("application/vnd.cncf.model.weight.config.v1.tar+zstd", "tar+zstd"),
        ("application/vnd.cncf.model.weight", "weight"),
    ],
)
def test_the_type_of_a_layer_says_how_a_model_pack_packs(kind, packing):
    """oras names tars what is none."""
    assert read(manifest(layer(mediaType=kind)), "") == {"x": Layer(DIGEST, 7, packing)}


def test_files_of_folders_are_left_out_and_a_model_pack_names_its_files_itself():
    named = layer(annotations={MODEL_PATH: "x", TITLE: "another"})
    assert list(read(manifest(layer("checkpoint-500/x"), named), "")) == ["x"]
    assert read(manifest(), "") == {}


def test_an_index_names_each_manifest_once():
    other = DIGEST.replace("0", "1")
    assert read(index({"digest": DIGEST}, {"digest": other}, {"digest": DIGEST}), "") == [DIGEST, other]


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([DIGEST, TITLE, "x", MANIFEST])
)
KEYS = st.sampled_from(
    ["mediaType", "layers", "manifests", "config", "annotations", "digest", "size", TITLE, MODEL_PATH]
)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=20
)


@given(DOCUMENTS, st.sampled_from([MANIFEST, INDEX, ""]))
def test_no_document_gives_another_error_or_a_name_that_leads_out(document, kind):
    try:
        found = read(json.dumps(document).encode(errors="replace"), kind)
    except NotAnArtifact:
        return
    assert isinstance(found, list) or not any("/" in name or name in {"", ".", ".."} for name in found)
