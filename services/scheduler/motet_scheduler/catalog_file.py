"""The last catalog on disk, so that a restarted scheduler can place requests before the operator has called."""

from pathlib import Path

import orjson
import structlog
from pydantic import TypeAdapter, ValidationError

from motet_scheduler.policy.memory import SavedCatalog

log = structlog.get_logger(__name__)

VERSION = 1


class CatalogFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failing = False

    def read(self) -> SavedCatalog | None:
        """What was written last; None, with a word in the log, when there is nothing that can be read."""
        try:
            content = orjson.loads(self._path.read_bytes())
            if content.get("version") != VERSION:
                log.warning("the remembered catalog is of another version; waiting for the operator's")
                return None
            return TypeAdapter(SavedCatalog).validate_python(content["remembered"])
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError, ValidationError, AttributeError, KeyError) as error:
            log.warning("the remembered catalog cannot be read; waiting for the operator's", error=str(error))
            return None

    def write(self, remembered: SavedCatalog) -> bool:
        """Replace it, or leave the old one whole. A full disk costs a warning, never a request."""
        beside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(orjson.dumps({"version": VERSION, "remembered": remembered}))
            beside.replace(self._path)
        except OSError as error:
            if not self._failing:
                log.warning("cannot remember the catalog; trying again", path=str(self._path), error=str(error))
            self._failing = True
            return False
        self._failing = False
        return True
