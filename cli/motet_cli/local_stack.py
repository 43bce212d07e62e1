"""The running local stack, for commands that read or change what is declared in it."""

from dataclasses import dataclass
from pathlib import Path

from motet.errors import SetupError
from motet.processes import ProcessRecords
from motet.processes.linux import environment_of
from motet.resources import Manifest, ServingPool, files_of, read_file
from motet_operator.local.state_directory import StateDirectory


@dataclass(frozen=True, slots=True)
class LocalStack:
    layout: StateDirectory
    watched: Path
    """The folder or file of manifests that `motet up` watches."""

    def manifests(self) -> list[Manifest]:
        """All valid objects. Files with problems are left out: `motet status` shows the problems."""
        try:
            files = files_of(self.watched)
        except OSError as error:
            raise SetupError(
                f"{self.watched} can't be read: {error.strerror}. Motet watches it for manifests."
            ) from None
        return [manifest for file in files for manifest in read_file(file).manifests]

    def pools(self) -> list[Manifest]:
        return [one for one in self.manifests() if isinstance(one.resource, ServingPool)]


def running_stack(data_dir: Path, *, in_a_cluster: str) -> LocalStack:
    """Raises SetupError if no local stack runs. `in_a_cluster`: what to do there instead."""
    layout = StateDirectory.of(data_dir)
    operator = ProcessRecords(layout.operator_records).read().get("operator")
    watched = environment_of(operator.pid).get("MOTET_OPERATOR_MANIFESTS") if operator and operator.alive else None
    if watched is None:
        services = ProcessRecords(layout.service_records).read().values()
        what = "The operator" if any(service.alive for service in services) else "Motet"
        raise SetupError(
            f"{what} is not running (state directory {layout.data}). Start it: motet up --data-dir "
            f"{layout.shell_path}\nIn a cluster: {in_a_cluster}"
        )
    return LocalStack(layout, Path(watched))
