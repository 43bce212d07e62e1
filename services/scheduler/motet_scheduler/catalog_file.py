"""Saves the last catalog to disk, so that a restarted scheduler can place requests before the operator connects."""

from pathlib import Path

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from motet_scheduler.policy.catalog import SavedCatalog

log = structlog.get_logger(__name__)

VERSION = 1


class CatalogFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failing = False

    def read(self) -> SavedCatalog | None:
        """The catalog that was written last. None if there is no file, or if it can't be read, which is logged."""
        try:
            content = orjson.loads(self._path.read_bytes())
            if content.get("version") != VERSION:
                log.warning(
                    "saved_catalog_version_unknown",
                    version=content.get("version"),
                    hint="The scheduler waits for the operator's catalog.",
                )
                return None
            return TypeAdapter(SavedCatalog).validate_python(content["remembered"])
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError, ValidationError, AttributeError, KeyError) as error:
            log.warning(
                "saved_catalog_unreadable", error=str(error), hint="The scheduler waits for the operator's catalog."
            )
            return None

    def write(self, saved: SavedCatalog) -> bool:
        """Replace the file atomically. False if that fails: the old file stays, and requests are not affected."""
        beside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(orjson.dumps({"version": VERSION, "remembered": saved}))
            beside.replace(self._path)
        except OSError as error:
            if not self._failing:
                log.warning("catalog_save_failed", path=str(self._path), error=str(error))
            self._failing = True
            return False
        self._failing = False
        return True
