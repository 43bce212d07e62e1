"""The running local stack, for commands that read or change what is declared in it."""

from dataclasses import dataclass
from pathlib import Path

from motet.errors import StateDirectoryError
from motet.processes import ProcessRecords
from motet.processes.linux import environment_of
from motet_operator.local.manifest_folder import DeclaredObjects, ManifestFolder
from motet_operator.local.state_directory import StateDirectory
from motet_runner.settings import Settings as RunnerSettings

MAX_ADAPTER_BYTES: int = RunnerSettings.model_fields["max_adapter_mib"].default << 20


@dataclass(frozen=True, slots=True)
class LocalStack:
    layout: StateDirectory
    watched: Path
    """The folder or file of manifests that `motet up` watches."""
    max_adapter_bytes: int = MAX_ADAPTER_BYTES
    """What its runners take"""

    def declared(self) -> DeclaredObjects:
        """What the operator accepts: of a file with a problem, the last valid version stays in use."""
        folder = ManifestFolder(self.watched, self.layout.accepted_manifests)
        folder.recall()
        return folder.look()


def running_stack(data_dir: Path, *, in_a_cluster: str) -> LocalStack:
    """Raises StateDirectoryError if no local stack runs. `in_a_cluster`: what to do there instead."""
    layout = StateDirectory.of(data_dir)
    operator = ProcessRecords(layout.operator_records).read().get("operator")
    environment = environment_of(operator.pid) if operator and operator.alive else {}
    watched = environment.get("MOTET_OPERATOR_MANIFESTS")
    if watched is None:
        services = ProcessRecords(layout.service_records).read().values()
        what = "The operator" if any(service.alive for service in services) else "Motet"
        raise StateDirectoryError(
            f"{what} is not running (state directory {layout.data}). Start it: motet up --data-dir "
            f"{layout.shell_path}\nIn a cluster: {in_a_cluster}"
        )
    mib = environment.get("MOTET_RUNNER_MAX_ADAPTER_MIB", "")
    return LocalStack(layout, Path(watched), int(mib) << 20 if mib.isdecimal() else MAX_ADAPTER_BYTES)
