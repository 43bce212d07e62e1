"""`python -m motet_cli.demo_volume FOLDER TENANT…`: fills a volume that a pool mounts, with the bundled model, and with
its adapters in one folder for each tenant.

A Job of examples/cluster runs it with the runner's image. Locally it fills the folder that is used as the volume.
"""

import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path


def main() -> None:
    match sys.argv[1:]:
        case [folder, *tenants] if tenants:
            target = Path(folder)
        case _:
            sys.exit("usage: python -m motet_cli.demo_volume FOLDER TENANT…")
    try:
        with as_file(files("motet_cli") / "bundled") as bundled:
            for name, place in (("model", "model"), *(("adapters", f"adapters/{tenant}") for tenant in tenants)):
                shutil.copytree(bundled / name, target / place, dirs_exist_ok=True, copy_function=shutil.copyfile)
    except OSError as error:
        sys.exit(f"cannot copy the bundled model to {target}: {error.strerror or error}")


if __name__ == "__main__":
    main()
