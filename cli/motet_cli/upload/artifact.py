"""The manifest of an adapter's files as an OCI artifact, in the form of `oras push`: a layer for each file. Pure.

The same files give the same manifest: it names no time.
"""

from collections.abc import Sequence

import orjson

from motet_cli.upload.blobs import Blob, blob_of
from motet_runner.sources.oci_manifest import MANIFEST, TITLE

ARTIFACT_TYPE = "application/vnd.motet.adapter.v1"
FILE_TYPE = "application/octet-stream"

EMPTY = blob_of("the empty configuration", b"{}")
"""What OCI gives an artifact without a configuration"""


def manifest_of(files: Sequence[Blob]) -> Blob:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": EMPTY.digest, "size": EMPTY.size},
        "layers": [
            {"mediaType": FILE_TYPE, "digest": one.digest, "size": one.size, "annotations": {TITLE: one.name}}
            for one in sorted(files, key=lambda one: one.name)
        ],
    }
    return blob_of("the manifest", orjson.dumps(document))
