"""Saves the last catalog to disk, so that a restarted scheduler can place requests before the operator connects.

The file has the term in which it was written, and counts only for the very next term: a scheduler that led in between
has heard what this file does not know, such as adapters that were deleted or are no longer shared. So a new leader soon
writes the file again, in its own term.
"""

from contextlib import suppress
from pathlib import Path

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from motet.disk import Disk
from motet_scheduler.policy.catalog import SavedCatalog

log = structlog.get_logger(__name__)

VERSION = 2
HINT = "The scheduler waits for the operator's catalog."


class CatalogFile:
    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._failing = False

    def read(self, term: int) -> SavedCatalog | None:
        """The catalog that the scheduler before the one of `term` saved. None if there is no file, or one that was
        written earlier or can't be read, which is logged."""
        try:
            content = orjson.loads(self._disk.read(self._path))
            if content.get("version") != VERSION:
                log.warning("saved_catalog_version_unknown", version=content.get("version"), hint=HINT)
                return None
            if content["term"] != term - 1:
                log.warning("saved_catalog_outdated", written_in_term=content["term"], term=term, hint=HINT)
                return None
            return TypeAdapter(SavedCatalog).validate_python(content["remembered"])
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError, ValidationError, AttributeError, KeyError) as error:
            log.warning("saved_catalog_unreadable", error=str(error), hint=HINT)
            return None

    def write(self, saved: SavedCatalog, term: int) -> bool:
        """Replace the file atomically. False if that fails, which does not affect requests. Then the old file goes:
        its term would make a successor take it for the newest."""
        try:
            self._disk.replace(self._path, orjson.dumps({"version": VERSION, "term": term, "remembered": saved}))
        except OSError as error:
            if not self._failing:
                log.warning("catalog_save_failed", path=str(self._path), error=str(error))
            self._failing = True
            self.remove()
            return False
        self._failing = False
        return True

    def remove(self) -> None:
        with suppress(OSError):
            self._disk.remove(self._path)
