"""`python -m motet_operator`: the local operator, as `motet up` starts it."""

from motet.service import run
from motet.settings import ProcessSettings
from motet_operator.local.layout import Layout
from motet_operator.local.operator import LocalOperator
from motet_operator.local.settings import Settings


def main() -> None:
    process = ProcessSettings()
    operator = LocalOperator(Layout.of(process.data_dir), process, Settings())
    run("motet-operator", process, operator.run)


if __name__ == "__main__":
    main()
