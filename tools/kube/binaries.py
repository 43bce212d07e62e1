"""The Kubernetes tools for the tests of a cluster, an object store and a registry: their names, the Go module that
builds each, and their files.

The environment may name a file, in the order of envtest: variables such as `TEST_ASSET_KUBE_APISERVER` name one file,
`KUBEBUILDER_ASSETS` names a folder. Without them, our own build (`make kube`) in the user's cache is used.
"""

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Module:
    """A Go module beside this file. Each has its own dependencies: its tools were tested with these versions."""

    name: str
    release: str
    """The module path whose version is the version of these tools."""
    packages: tuple[tuple[str, str], ...]
    """The tools: each file name with the Go package of its main function."""
    stamped: tuple[str, ...] = ()
    """Linker variables that set the version, with {version}, {major} and {minor}. Go modules do not contain it."""

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @cached_property
    def version(self) -> str:
        found = re.search(rf"^\s*(?:require )?{re.escape(self.release)} (v\S+)", self._text("go.mod"), re.MULTILINE)
        if found is None:
            raise LookupError(f"{self.folder / 'go.mod'} does not require {self.release}")
        return found[1]

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """Flags with which the same source gives the same bytes everywhere: no paths, symbols or version control."""
        major, minor, _ = self.version.removeprefix("v").split(".", 2)
        values = {"version": self.version, "major": major, "minor": minor}
        linker = ["-s", "-w", *(f"-X={variable.format(**values)}" for variable in self.stamped)]
        return ("-trimpath", "-buildvcs=false", "-mod=readonly", f"-ldflags={' '.join(linker)}")

    @cached_property
    def built(self) -> Path:
        """The folder of the tools built from exactly these files. If a file changes, the folder is another one."""
        state = "\0".join((self._text("go.mod"), self._text("go.sum"), *self.flags, platform.machine()))
        return cache() / f"{self.name}-{self.version}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text()


def _kubernetes_version(package: str) -> tuple[str, ...]:
    values = {
        "gitVersion": "{version}",
        "gitMajor": "{major}",
        "gitMinor": "{minor}",
        "gitCommit": "",  # without this it is the placeholder that git replaces in an archive
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    return tuple(f"{package}.{name}={value}" for name, value in values.items())


KUBERNETES = Module(
    name="kubernetes",
    release="k8s.io/kubernetes",
    packages=(
        ("etcd", "go.etcd.io/etcd/server/v3"),
        ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
        ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
        ("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    ),
    # Set both: servers read the first, clients (user agent, `kubectl version`) read the second.
    stamped=_kubernetes_version("k8s.io/component-base/version") + _kubernetes_version("k8s.io/client-go/pkg/version"),
)
HELM = Module(
    name="helm",
    release="helm.sh/helm/v4",
    packages=(("helm", "helm.sh/helm/v4/cmd/helm"),),
    stamped=("helm.sh/helm/v4/internal/version.version={version}",),
)
KWOK = Module(
    name="kwok",
    release="sigs.k8s.io/kwok",
    packages=(("kwok", "sigs.k8s.io/kwok/cmd/kwok"),),
)
VERSITYGW = Module(
    name="versitygw",
    release="github.com/versity/versitygw",
    packages=(("versitygw", "github.com/versity/versitygw/cmd/versitygw"),),
)
DISTRIBUTION = Module(
    name="distribution",
    release="github.com/distribution/distribution/v3",
    packages=(("registry", "github.com/distribution/distribution/v3/cmd/registry"),),
)
ORAS = Module(
    name="oras",
    release="oras.land/oras",
    packages=(("oras", "oras.land/oras/cmd/oras"),),
)
MODULES = (KUBERNETES, HELM, KWOK, VERSITYGW, DISTRIBUTION, ORAS)
NOT_NEEDED_BESIDE_A_CLUSTER = frozenset({"etcd", "kube-apiserver", "kube-controller-manager"})


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "motet" / "kube"


def uses_existing_cluster() -> bool:
    """Whether the tests run against the cluster of the caller's kubeconfig."""
    return os.environ.get("USE_EXISTING_CLUSTER", "").lower() in {"1", "true", "yes"}


def given(tool: str) -> Path | None:
    """The file that the environment names for this tool. Raises FileNotFoundError if that file doesn't exist."""
    variable = f"TEST_ASSET_{tool.upper().replace('-', '_')}"
    if named := os.environ.get(variable):
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{variable} names {named}, which does not exist or is not executable")
        return Path(named)
    if folder := os.environ.get("KUBEBUILDER_ASSETS"):
        # A folder of envtest has only an API server, etcd and kubectl. The other tools are those we build.
        inside = Path(folder) / tool
        return inside if os.access(inside, os.X_OK) else None
    return None


def find(tool: str) -> Path | None:
    """The file of this tool, or None if it must be built first. Raises FileNotFoundError like `given`."""
    (built,) = (module.built / tool for module in MODULES if tool in dict(module.packages))
    return given(tool) or (built if built.exists() else None)
