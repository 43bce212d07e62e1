"""`python -m motet_operator.cluster`: the operator on a cluster, as the chart starts it."""

from motet.lease import LeaseSettings
from motet.service import read, run
from motet.settings import ProcessSettings
from motet_operator.cluster.operator import ClusterOperator
from motet_operator.settings import ClusterSettings


def main() -> None:
    process = read(ProcessSettings)
    operator = ClusterOperator(process, read(ClusterSettings), read(LeaseSettings))
    run("operator", process, operator.run)


if __name__ == "__main__":
    main()
