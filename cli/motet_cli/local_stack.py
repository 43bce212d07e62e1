"""The running local stack, for commands that read or change what is declared in it."""

from dataclasses import dataclass
from pathlib import Path

from motet.errors import SetupError
from motet.processes import ProcessRecords
from motet.processes.linux import environment_of
from motet_operator.local.manifest_folder import DeclaredObjects, ManifestFolder
from motet_operator.local.state_directory import StateDirectory


@dataclass(frozen=True, slots=True)
class LocalStack:
    layout: StateDirectory
    watched: Path
    """The folder or file of manifests that `motet up` watches."""

    def declared(self) -> DeclaredObjects:
        """What the operator accepts: of a file with a problem, the last valid version stays in use."""
        folder = ManifestFolder(self.watched, self.layout.accepted_manifests)
        folder.recall()
        return folder.look()


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
