"""Fetches the files of a folder in a bucket: those that one listing has, as they were then."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx2

from motet.errors import AdapterFetchFailed
from motet.sources import ACCESS_KEY, SESSION_TOKEN, STORE_REGION
from motet_runner.sources.fetch_errors import credentials, temporary, too_large
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.s3 import S3Uri, root_of
from motet_runner.sources.s3_listing import (
    MAX_FILES,
    MAX_PAGE_BYTES,
    MAX_PAGES,
    Listed,
    NotAListing,
    Page,
    query,
    read_page,
)
from motet_runner.sources.s3_refusals import (
    MAX_ERROR_BYTES,
    OTHER_REGION_CODES,
    PASSING_CODES,
    REGION,
    AnotherRegion,
    code_of,
    passing,
    refusal,
    region_of,
)
from motet_runner.sources.s3_signature import AccessKey, signed
from motet_runner.sources.web_folder import WebFolder, size_of, tag_in
from motet_runner.sources.web_requests import PASSING, Interrupted, check_plain, number, retry_after

_REGION_HEADER = "x-amz-bucket-region"


class S3Folder(WebFolder):
    def __init__(self, uri: S3Uri, endpoint: str, opening: Opening) -> None:
        """`endpoint`: empty for AWS."""
        super().__init__("", opening.client, {}, opening.need, opening.pause, on_checked=opening.on_checked)
        values = opening.secret.values
        self.name = f"s3://{uri.bucket}/{uri.prefix}"
        self._uri = uri
        self._endpoint = endpoint
        key, secret = (values.get(name, "") for name in ACCESS_KEY)
        self._key = AccessKey(key, secret, values.get(SESSION_TOKEN, "")) if key else None
        region = values.get(STORE_REGION) or opening.order.access.s3_region
        if not REGION.fullmatch(region):
            raise credentials(f"{STORE_REGION} of the Secret in source.credentialsSecretRef is no region. Correct it.")
        self._go_to(region)
        try:
            self._files = self._listed()
        except AnotherRegion as other:
            if not REGION.fullmatch(other.told) or other.told == region:
                raise
            self._go_to(other.told)
            self._files = self._listed()
        self.sizes = {name: file.size for name, file in self._files.items()}

    def _go_to(self, region: str) -> None:
        self._region = region
        self._root = root_of(self._uri.bucket, self._endpoint, region)
        self.url = self._root + quote(self._uri.prefix)

    def _listed(self) -> dict[str, Listed]:
        files: dict[str, Listed] = {}
        token = ""
        for _ in range(MAX_PAGES):
            page = self._patiently(partial(self._page, token), lambda: 0, self.name)
            files.update(page.files)
            if len(files) > MAX_FILES:
                break
            if not (token := page.next):
                return files
        raise too_large(
            f"The listing of {self.name} has more than {MAX_FILES} files or {MAX_PAGES} pages, which is the limit. Put "
            "the files into a folder of their own."
        )

    def _page(self, token: str) -> Page:
        with self._answer(f"{self._root}?{query(self._uri.prefix, token)}", {}) as response:
            self._check(response, "the listing")
            body = self._body(response, MAX_PAGE_BYTES + 1)
        if len(body) > MAX_PAGE_BYTES:
            raise too_large(f"A page of the listing of {self.name} has more than {MAX_PAGE_BYTES} bytes.")
        try:
            return read_page(body, self._uri.prefix)
        except NotAListing as wrong:
            raise temporary(
                f"{self.name} cannot be listed: {wrong}. Is the endpoint that of an object store?"
            ) from None

    def fetch(self, file: WantedFile, into: Path) -> bool:
        if file.name not in self._files:
            return False
        try:
            return super().fetch(WantedFile(file.name, self._files[file.name].size), into)
        except AdapterFetchFailed as failure:
            if failure.reason == "TooLarge":  # the pool admits what the listing says
                raise self._changed(file.name) from None
            raise

    def _once(self, file: WantedFile, part: Path, tag: Path) -> None:
        listed = self._files[file.name]
        same = bool(listed.etag) and tag_in(tag).strip('"') == listed.etag
        if same and part.exists() and size_of(part) == listed.size:
            return
        if not same or size_of(part) > listed.size:
            part.unlink(missing_ok=True)
        super()._once(file, part, tag)
        if size_of(part) != listed.size:
            came = size_of(part)
            part.unlink()
            raise Interrupted(f"it has {came} bytes, but the listing says {listed.size}")

    def _own_headers(self, url: str) -> Mapping[str, str]:
        return signed(self._key, self._region, url, datetime.now(UTC)) if self._key else {}

    def _check_redirect(self, response: httpx2.Response) -> None:
        told = response.headers.get(_REGION_HEADER, "")
        if (told and told != self._region) or not response.headers.get("location"):
            raise AnotherRegion(self.name, told if REGION.fullmatch(told) else "")

    def _check_status(self, response: httpx2.Response, file: WantedFile) -> None:
        self._check(response, file.name)
        listed = self._files[file.name]
        etag = response.headers.get("etag", "").removeprefix("W/").strip('"')
        if response.status_code != 416 and listed.etag and etag != listed.etag:
            raise self._changed(file.name)
        length = number(response.headers.get("content-length", ""))
        if response.status_code == 200 and length not in (None, listed.size):
            raise Interrupted(f"the store sends {length} bytes, but its listing says {listed.size}")

    def _check(self, response: httpx2.Response, what: str) -> None:
        status = response.status_code
        if status in (200, 206):
            return check_plain(response, f"{what} of {self.name}")
        if status == 416:
            return None
        body = self._body(response, MAX_ERROR_BYTES)
        code, told = code_of(body), region_of(body) or response.headers.get(_REGION_HEADER, "")
        if code == "NoSuchKey":
            raise self._changed(what)
        malformed = code == "AuthorizationHeaderMalformed" and told in ("", self._region)
        if code in OTHER_REGION_CODES and not malformed:
            raise AnotherRegion(self.name, told if REGION.fullmatch(told) else "")
        if status in PASSING or code in PASSING_CODES:
            raise Interrupted(passing(status, code), retry_after(response))
        raise refusal(self.name, what, status, code, given=self._key is not None)

    def _changed(self, name: str) -> AdapterFetchFailed:
        return temporary(
            f"{name} of {self.name} has changed or gone since the folder was listed. Motet lists it again "
            "automatically. Publish new files in a new folder."
        )
