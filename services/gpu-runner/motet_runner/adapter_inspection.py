"""Checks an adapter as a runner would, without one: the same reading of the folder, the same process, the same
messages. Needs no torch; `execute.load.base_outline` says what the base model is like."""

from dataclasses import dataclass
from pathlib import Path

from motet.digest import adapter_digest, adapter_files
from motet.errors import AdapterError, AdapterFetchFailed, Internal, SetupError
from motet_runner.adapters.certification import Certification, EngineLimits
from motet_runner.adapters.check_processes import CheckProcesses
from motet_runner.sources.folder import adapter_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVerdict:
    """Served if there is a certification, else refused."""

    certification: Certification | None = None
    refusal: AdapterError | None = None
    digest: str = ""
    """Empty: files are missing, too large or no files."""
    bytes: int = 0


def verdict_on(folder: Path, limits: EngineLimits, *, max_bytes: int) -> AdapterVerdict:
    """`max_bytes`: the most bytes of the weights. Raises OSError for files that cannot be read, and SetupError if the
    check itself could not run."""
    digest, size = "", 0
    checks = CheckProcesses(limits)
    try:
        folder = folder_with_files(folder, max_bytes)
        digest, size = adapter_digest(folder), sum((folder / name).stat().st_size for name in adapter_files(folder))
        return AdapterVerdict(certification=_certified(folder, checks), digest=digest, bytes=size)
    except AdapterError as refusal:
        return AdapterVerdict(refusal=refusal, digest=digest, bytes=size)
    finally:
        checks.close()


def _certified(folder: Path, checks: CheckProcesses) -> Certification:
    try:
        return checks.check(folder)
    except (AdapterFetchFailed, Internal) as error:
        raise SetupError(
            f"the check of {folder} could not be finished: its process has ended or failed, perhaps for lack of "
            "memory. The lines above may say more. Try again."
        ) from error


def folder_with_files(folder: Path, max_bytes: int) -> Path:
    """The folder itself, or the snapshot in it if it is a hub's cache folder. Raises AdapterFetchFailed if a file is
    missing, too large, or no file."""
    found = adapter_folder(folder, None)
    found.stat_files(max_bytes)
    return found.path
