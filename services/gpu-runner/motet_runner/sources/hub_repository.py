"""Fetches the files of a repository on a hub, or on a mirror with the same API, with the hub's own library."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import credentials, forbidden, missing, temporary, too_large
from motet_runner.sources.file_digest import sha256_of
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.web_requests import explain, refused

MAX_ANSWER_BYTES = 16 << 20
"""The most bytes of an answer that is held in memory: an error, a redirect, or a listing (of up to 50,000 files).
Files are written to disk as they come."""


class HubRepository:
    """One commit of a repository: so a branch that changes during the fetch gives no mixture of two commits."""

    def __init__(self, repository: str, revision: str, opening: Opening) -> None:
        from huggingface_hub import HfApi, set_client_factory

        client = opening.client
        client.follow_redirects = True
        client.event_hooks = {"response": [_limit_body]}
        set_client_factory(lambda: client)
        self.name = f"hf://{repository}"
        self._repository = repository
        self._revision = revision
        self._token: str | bool = opening.secret.token or False
        self._endpoint = opening.order.access.hub_endpoint.rstrip("/")
        self._timeout = timeout = opening.order.stall_seconds
        self._on_checked = opening.on_checked
        api = HfApi(endpoint=self._endpoint, token=self._token)
        info = self._call(lambda: api.model_info(repository, revision=revision, files_metadata=True, timeout=timeout))
        self.revision: str = info.sha or ""
        siblings = info.siblings or []
        self.sizes: dict[str, int | None] = {file.rfilename: file.size for file in siblings}
        self._listed_sha256 = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs is not None}

    def fetch(self, file: WantedFile, into: Path) -> bool:
        if file.name not in self.sizes:
            return False
        from huggingface_hub import hf_hub_download

        path = into / file.name
        size = self.sizes[file.name]
        if size is not None and path.exists() and path.stat().st_size != size:
            path.unlink()  # the library takes a file of this name for the whole one
        self._call(
            lambda: hf_hub_download(
                self._repository,
                file.name,
                revision=self.revision,
                local_dir=into,
                cache_dir=into / ".cache" / "none",
                endpoint=self._endpoint,
                token=self._token,
                etag_timeout=self._timeout,
            )
        )
        expected = self._listed_sha256.get(file.name)
        if expected and sha256_of(path, self._on_checked) != expected:
            path.unlink()
            raise temporary(f"{file.name} of {self.name} arrived damaged. Motet tries again automatically.")
        return True

    def confirm(self, into: Path) -> None:
        """All files are those of one commit."""

    def _call(self, call: Any) -> Any:
        from huggingface_hub import errors

        name = f"{self.name} at {self._revision}"
        try:
            return call()
        except errors.GatedRepoError as error:
            raise refused(name, error.response.status_code, given=bool(self._token)) from None
        except errors.RepositoryNotFoundError as error:
            if error.response.status_code in (401, 403):
                raise credentials(
                    f"{self.name} does not exist, or the token in source.credentialsSecretRef may not read it."
                    if self._token
                    else f"{self.name} does not exist, or it needs a Secret in source.credentialsSecretRef."
                ) from None
            raise missing(f"There is no repository {self.name} at {self._endpoint}. Correct the source.") from None
        except errors.RevisionNotFoundError:
            raise missing(f"{self.name} has no revision {self._revision}. Correct the revision.") from None
        except errors.LocalEntryNotFoundError as error:  # the request for the file's headers failed
            why = (
                explain(error.__cause__) if isinstance(error.__cause__, httpx2.HTTPError) else "the hub does not answer"
            )
            raise temporary(f"Motet cannot fetch {name} from {self._endpoint}: {why}.") from None
        except errors.EntryNotFoundError:
            raise missing(f"{name} lists a file that it does not have. Correct the repository.") from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise refused(name, status, given=bool(self._token)) from None
            if status == 429 or status >= 500:
                raise temporary(f"Motet cannot fetch {name}: the hub answers {status}.") from None
            raise missing(f"Motet cannot fetch {name}: the hub answers {status}.") from None
        except httpx2.HTTPError as error:
            raise temporary(f"Motet cannot fetch {name} from {self._endpoint}: {explain(error)}.") from None
        except AdapterFetchFailed:
            raise
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # this machine's disk, not the hub
            raise temporary(f"Motet cannot fetch {name}: {type(error).__name__}.") from None


def _limit_body(response: httpx2.Response) -> None:
    """Called once the headers have come, before anything reads the body."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise forbidden("The hub sends compressed data, although Motet asked for plain data.")
    in_memory = response.status_code >= 300 or "/api/models/" in response.request.url.path
    if in_memory and isinstance(response.stream, httpx2.SyncByteStream):
        response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for chunk in self._stream:
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise too_large(
                    f"The hub sent a listing, a redirect or an error of more than {MAX_ANSWER_BYTES} bytes, which is "
                    "the limit."
                )
            yield chunk

    def close(self) -> None:
        self._stream.close()
