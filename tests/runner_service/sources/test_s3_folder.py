"""What is asked of which host, and answers that no test server gives: the store is a function."""

import httpx2
import pytest

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_order import FetchOrder, NetworkAccess
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.s3 import S3Uri
from motet_runner.sources.secret import NO_CREDENTIALS, SourceCredentials

LISTING = (
    "<ListBucketResult><Contents><Key>a/x</Key><Size>{size}</Size><ETag>&quot;e1&quot;</ETag></Contents>"
    "</ListBucketResult>"
)
X = WantedFile("x", 1 << 20)


class Store:
    """Answers listings with a file `a/x`, and all else with `body` in pieces, without a length."""

    def __init__(self, body: bytes = b"", size: int | None = None, **answers: httpx2.Response) -> None:
        self.asked: list[str] = []
        self.checked: list[int] = []
        self._body = body
        self._size = len(body) if size is None else size
        self._answers = answers
        self.encoding = ""

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(str(request.url).partition("?")[0])
        if found := self._answers.get(request.url.host.replace(".", "_").replace("-", "_")):
            return found
        if "list-type" in request.url.query.decode():
            pieces, headers = [LISTING.format(size=self._size).encode()], {}
        else:
            pieces, headers = [self._body[:1], self._body[1:]], {"etag": '"e1"'}
        if self.encoding:
            headers["content-encoding"] = self.encoding
        return httpx2.Response(200, content=iter(pieces), headers=headers)

    def open(self, bucket: str = "bucket", secret: SourceCredentials = NO_CREDENTIALS, **access: str):
        order = FetchOrder(
            what="adapter",
            uri=f"s3://{bucket}/a",
            into="",
            max_bytes=1 << 20,
            stall_seconds=0.06,
            min_average_bytes_per_second=1,
            access=NetworkAccess(**access),
        )
        return S3Uri(bucket, "a/").open(
            Opening(
                order=order,
                secret=secret,
                client=httpx2.Client(transport=httpx2.MockTransport(self.answer)),
                on_checked=self.checked.append,
                need=lambda *_: 0,
            )
        )


@pytest.mark.parametrize(
    ("bucket", "access", "root"),
    [
        ("bucket", {}, "https://bucket.s3.us-east-1.amazonaws.com/"),
        ("bucket", {"s3_region": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com/"),
        ("my.bucket", {}, "https://s3.us-east-1.amazonaws.com/my.bucket/"),
        ("bucket", {"s3_region": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn/"),
        ("my.bucket", {"s3_region": "cn-north-1"}, "https://s3.cn-north-1.amazonaws.com.cn/my.bucket/"),
        ("bucket", {"s3_endpoint": "http://minio.local:9000/"}, "http://minio.local:9000/bucket/"),
    ],
)
def test_buckets_of_aws_have_hosts_and_those_of_others_are_paths(bucket, access, root, tmp_path):
    store = Store(b"hello")
    assert store.open(bucket, **access).fetch(X, tmp_path)
    assert store.asked == [root, f"{root}a/x"]


@pytest.mark.parametrize("answer", [(301, ""), (400, "IllegalLocationConstraintException")])
def test_a_bucket_of_aws_in_another_region_is_asked_for_there(tmp_path, answer):
    status, code = answer
    body = f"<Error><Code>{code}</Code></Error>".encode()
    elsewhere = httpx2.Response(status, headers={"x-amz-bucket-region": "ap-south-2"}, content=iter([body]))
    store = Store(b"hello", bucket_s3_us_east_1_amazonaws_com=elsewhere)
    assert store.open().fetch(X, tmp_path)
    there = "https://bucket.s3.ap-south-2.amazonaws.com/"
    assert store.asked == ["https://bucket.s3.us-east-1.amazonaws.com/", there, f"{there}a/x"]


def test_the_secrets_store_and_region_come_before_the_platforms(tmp_path):
    store = Store(b"hello")
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    own = SourceCredentials(keys | {"AWS_ENDPOINT_URL": "https://own.example", "AWS_REGION": "r-1"})
    assert store.open(secret=own, s3_endpoint="http://minio.local:9000").fetch(X, tmp_path)
    assert store.asked == ["https://own.example/bucket/", "https://own.example/bucket/a/x"]


@pytest.mark.parametrize("body", [b"", b"hello"])
def test_a_body_without_a_length_is_taken_if_it_is_as_long_as_listed(tmp_path, body):
    assert Store(body).open().fetch(X, tmp_path)
    assert (tmp_path / "x").read_bytes() == body


@pytest.mark.parametrize(("size", "words"), [(6, "it has 5 bytes, but the listing says 6"), (4, "x of .* has changed")])
def test_a_body_without_a_length_is_not_taken_if_it_is_longer_or_shorter(tmp_path, size, words):
    with pytest.raises(AdapterFetchFailed, match=words):
        Store(b"hello", size).open().fetch(X, tmp_path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("encoding", ["aws-chunked", "aws-chunked,", "Identity", " aws-chunked , identity"])
def test_what_aws_chunked_leaves_at_an_object_is_no_coding(tmp_path, encoding):
    """Tools of AWS upload so, and some stores repeat it."""
    store = Store(b"hello")
    store.encoding = encoding
    assert store.open().fetch(X, tmp_path)
    assert (tmp_path / "x").read_bytes() == b"hello"


@pytest.mark.parametrize("encoding", ["gzip", "aws-chunked,gzip", "x"])
def test_listings_and_objects_that_are_compressed_are_refused(tmp_path, encoding):
    store = Store(b"hello")
    opened = store.open()
    store.encoding = encoding
    with pytest.raises(AdapterFetchFailed, match=r"x of s3://bucket/a/ is sent compressed"):
        opened.fetch(X, tmp_path)
    with pytest.raises(AdapterFetchFailed, match=r"the listing of s3://bucket/a/ is sent compressed"):
        store.open()


def test_a_key_that_is_malformed_is_no_sign_of_another_region():
    """Some stores name their region in every error."""
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>us-east-1</Region></Error>"
    store = Store(bucket_s3_us_east_1_amazonaws_com=httpx2.Response(400, content=iter([body])))
    with pytest.raises(AdapterFetchFailed, match="Are the two keys swapped") as failed:
        store.open()
    assert failed.value.reason == "CredentialsInvalid"


def test_bytes_of_listings_and_errors_count_as_progress():
    """A long listing is no stall."""
    store = Store()
    store.open()
    assert sum(store.checked) == len(LISTING.format(size=0))


def test_an_error_is_read_no_further_than_needed():
    busy = httpx2.Response(403, content=iter([b"<Code>AccessDenied</Code>", *([b"x" * 65536] * 100)]))
    store = Store(bucket_s3_us_east_1_amazonaws_com=busy)
    with pytest.raises(AdapterFetchFailed, match="403 AccessDenied"):
        store.open()
    assert sum(store.checked) <= 2 * 65536
