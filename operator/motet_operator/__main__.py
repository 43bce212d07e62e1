"""`python -m motet_operator`: the local operator, as `motet up` starts it."""

from motet.imports import without_collections

with without_collections():
    from motet.read_settings import read
    from motet.service_main import run
    from motet.settings import ProcessSettings
    from motet.surroundings import real_surroundings
    from motet_operator.local.local_operator import LocalOperator
    from motet_operator.local.state_directory import StateDirectory
    from motet_operator.settings import Settings


def main() -> None:
    process = read(ProcessSettings)
    operator = LocalOperator(StateDirectory.of(process.data_dir), process, read(Settings), real_surroundings())
    run("motet-operator", process, operator.run)


if __name__ == "__main__":
    main()
