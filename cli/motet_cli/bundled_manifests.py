"""The bundled model, for `motet up` without `-f`."""

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from motet.errors import StateDirectoryError


def copy_to(folder: Path) -> None:
    """Copy model, adapters and manifests. If the folder exists, leave it: the user may have changed it."""
    if folder.is_dir():
        return
    temporary = folder.with_name(folder.name + ".copying")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with as_file(files("motet_cli") / "bundled") as bundled:
            shutil.copytree(bundled, temporary, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        temporary.rename(folder)  # in one step, so that the folder never has an incomplete model
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StateDirectoryError(
            f"cannot copy the bundled model to {folder}: {error.strerror or error}. "
            "Free some space, or use another --data-dir."
        ) from error
