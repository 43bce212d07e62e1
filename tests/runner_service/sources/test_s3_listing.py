"""A page of a listing is read, and whatever else a store answers is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_runner.sources.s3_listing import Listed, NotAListing, query, read_page

START = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'


def page(*entries: str, more: str = "", url: bool = False) -> bytes:
    encoding = "<EncodingType>url</EncodingType>" if url else ""
    return f"{START}{encoding}{''.join(entries)}{more}</ListBucketResult>".encode()


def entry(key: str, size: object = 3, etag: str = "&quot;e1&quot;") -> str:
    return f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{etag}</ETag></Contents>"


def test_files_of_the_folder_with_their_sizes_and_tags() -> None:
    found = read_page(page(entry("a/x.json"), entry("a/y", 0, "e2"), entry("a/z", 1, "W/&quot;e3&quot;")), "a/")
    assert found.files == {"x.json": Listed(3, "e1"), "y": Listed(0, "e2"), "z": Listed(1, "")}
    assert found.next == ""
    assert read_page(page(), "a/").files == {}


def test_encoded_names_are_decoded_only_if_the_store_says_that_they_are() -> None:
    assert list(read_page(page(entry("a%2Fb%2F%C3%A9"), url=True), "a/b/").files) == ["é"]
    assert list(read_page(page(entry("a/%41")), "a/").files) == ["%41"]
    assert list(read_page(page(entry("run+books/a%2Bb"), url=True), "run books/").files) == ["a+b"], "as AWS writes it"
    assert list(read_page(page(entry("run books/a+b")), "run books/").files) == ["a+b"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "b/x", "/etc/passwd", "x\\y", "x%00", "x%0A", "%1B[2J", "x" * 256]
)
def test_names_that_no_file_of_ours_has_are_left_out(name: str) -> None:
    assert read_page(page(entry(f"a/{name}"), entry("a/x"), url=True), "a/").files == {"x": Listed(3, "e1")}


def test_a_page_names_the_next_one() -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>to+ken/=</NextContinuationToken>"
    assert read_page(page(more=more), "").next == "to+ken/="
    assert "continuation-token=to%2Bken%2F%3D&" in query("a b/~é", "to+ken/=")
    assert query("a b/~é", "") == "delimiter=%2F&encoding-type=url&list-type=2&prefix=a%20b%2F~%C3%A9"
    last = "<IsTruncated>false</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    assert read_page(page(more=last), "").next == ""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not answer with XML"),
        (b"hello", "not answer with XML"),
        (page(entry("a/x"))[:-20], "not answer with XML"),
        (b'<?xml version="1.0" encoding="klingon"?><ListBucketResult/>', "not answer with XML"),
        (b"<html/>", "not answer with a listing"),
        (b"<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult/>", "document type"),
        (b"<!DOCTYPE a SYSTEM 'file:///etc/passwd'><ListBucketResult/>", "document type"),
        (page(entry("elsewhere/x")), "outside of the folder"),
        (page(entry("/etc/passwd")), "outside of the folder"),
        (page(entry("a/x", -1)), "makes no sense"),
        (page(entry("a/x", "1e9")), "makes no sense"),
        (page(entry("a/x", "9" * 19)), "makes no sense"),
        (page(entry("a/x", "٣")), "makes no sense"),
        (page(entry("a/x", 3, "e\r\nx: 1")), "makes no sense"),
        (page(entry("a/x", 3, "e" * 129)), "makes no sense"),
        (page(entry("a/x"), more="<IsTruncated>true</IsTruncated>"), "where its listing goes on"),
        (
            page(more=f"<IsTruncated>true</IsTruncated><NextContinuationToken>{'t' * 2049}</NextContinuationToken>"),
            "where its listing goes on",
        ),
    ],
)
def test_other_answers_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(NotAListing, match=why):
        read_page(body, "a/")


@pytest.mark.parametrize(
    "more", ["<a/>" * (1 << 19), "<a>" * 9 + "</a>" * 9, "".join(f"<a{n}/>" for n in range(300_000))]
)
def test_a_page_of_more_elements_than_a_listing_has_is_refused(more: str) -> None:
    with pytest.raises(NotAListing, match="more elements, or deeper ones"):
        read_page(page(more=more), "a/")


def test_only_what_lies_where_a_listing_has_it_is_read() -> None:
    owner = "<Owner><ID><Key>a/no</Key></ID></Owner><Key2>a/no</Key2>"
    more = f"<CommonPrefixes><Prefix>a/b/</Prefix><Contents>{owner}</Contents></CommonPrefixes>"
    inside = f"<Contents>{owner}<Key>a/&#120;</Key><Size>3</Size><ETag/>{owner}</Contents>"
    assert read_page(page(inside, more=more), "a/").files == {"x": Listed(3, "")}


def test_entities_are_not_expanded() -> None:
    bomb = "<!DOCTYPE a [<!ENTITY x0 'ha'>" + "".join(
        f"<!ENTITY x{level} '{f'&x{level - 1};' * 20}'>" for level in range(1, 12)
    )
    body = f"{bomb}]><ListBucketResult>{entry('a/&x11;')}</ListBucketResult>"
    for encoding in ("utf-8", "utf-16"):
        with pytest.raises(NotAListing):
            read_page(body.encode(encoding), "a/")


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_pages_give_no_other_error(noise: bytes, at: int) -> None:
    whole = page(entry("a/x"), entry("a/y"), more="<IsTruncated>false</IsTruncated>")
    for body in (noise, whole[:at] + noise + whole[at + len(noise) :]):
        try:
            found = read_page(body, "a/")
        except NotAListing:
            continue
        assert all("/" not in name and name.isprintable() for name in found.files)
