"""Signatures as Amazon publishes them in "Examples: Signature Calculations", and what a signature covers."""

import hashlib
from datetime import UTC, datetime

import httpx2
import pytest

from motet_runner.sources.s3_signature import EMPTY_BODY, AccessKey, signed
from tests.support.s3_server import signature as expected

KEY = AccessKey("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
BUCKET = "https://examplebucket.s3.amazonaws.com"
AT = datetime(2013, 5, 24, tzinfo=UTC)


@pytest.mark.parametrize(
    ("path", "headers", "names", "signature"),
    [
        (
            "/test.txt",
            {"range": "bytes=0-9"},
            "host;range;x-amz-content-sha256;x-amz-date",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "/?lifecycle=",
            {},
            "host;x-amz-content-sha256;x-amz-date",
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "/?max-keys=2&prefix=J",
            {},
            "host;x-amz-content-sha256;x-amz-date",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_published_examples(path: str, headers: dict[str, str], names: str, signature: str) -> None:
    got = signed(KEY, "us-east-1", BUCKET + path, AT, headers)
    assert got == {
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders={names},Signature={signature}",
    }


def signature(url: str, key: AccessKey = KEY, region: str = "us-east-1") -> str:
    return signed(key, region, url, AT)["authorization"].rpartition("=")[2]


def test_the_order_of_a_query_does_not_count_and_all_else_does() -> None:
    usual = signature(f"{BUCKET}/a?prefix=J&max-keys=2")
    assert usual == signature(f"{BUCKET}/a?max-keys=2&prefix=J")
    others = [
        signature(f"{BUCKET}/a?prefix=J&max-keys=3"),
        signature(f"{BUCKET}/A?prefix=J&max-keys=2"),
        signature("https://other.s3.amazonaws.com/a?prefix=J&max-keys=2"),
        signature(f"{BUCKET}/a?prefix=J&max-keys=2", region="eu-west-1"),
        signature(f"{BUCKET}/a?prefix=J&max-keys=2", AccessKey(KEY.id, "another")),
        signature(f"{BUCKET}/a?prefix=J&max-keys=2", AccessKey(KEY.id, KEY.secret, "a-token")),
    ]
    assert len({usual, *others}) == 1 + len(others)


def test_a_usual_port_is_no_part_of_the_host() -> None:
    assert signature("https://host:443/a") == signature("https://host/a") != signature("https://host:9000/a")
    assert signature("http://host:80/a") == signature("http://host/a") != signature("http://host:443/a")
    assert signature("https://[::1]/a") != signature("https://[::1]:9000/a")


@pytest.mark.parametrize("host", ["[2001:DB8::1]:9000", "MinIO.example:9000", "münchen:9000", "h:443", "[::1]"])
def test_the_host_is_signed_as_the_client_writes_it(host: str) -> None:
    url = f"https://{host}/a"
    sent = httpx2.Request("GET", url).headers["host"]
    headers = {"host": sent, "x-amz-content-sha256": EMPTY_BODY, "x-amz-date": "20130524T000000Z"}
    assert signature(url) == expected("GET", "/a", headers, KEY.secret, "us-east-1")


def test_a_body_and_its_method_are_signed() -> None:
    """The published example of an upload."""
    headers = {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
    body = hashlib.sha256(b"Welcome to Amazon S3.").hexdigest()
    url = f"{BUCKET}/test%24file.text"
    got = signed(KEY, "us-east-1", url, AT, headers, method="PUT", body_sha256=body)
    assert got["x-amz-content-sha256"] == body == "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
    assert got["authorization"].endswith(
        "SignedHeaders=date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class,"
        "Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
    )


def test_a_key_does_not_show_what_is_secret() -> None:
    assert "geheim" not in repr(AccessKey("id", "geheim", "geheim"))
