"""The custom resources of Motet (`motet.dev/v1alpha1`). These models validate manifests without a cluster, reconcile
reads them, and the CRDs are generated from them.

Each field here is enforced. `planned_fields` lists those that Motet does not enforce yet.
"""

from motet.resources.adapter import AdapterPlacement, AdapterSource, LoRAAdapter, LoRAAdapterSpec, PoolRef
from motet.resources.core_kinds import Namespace, Secret
from motet.resources.fields import API_VERSION, CATEGORY, GROUP, VERSION, ObjectMeta, forbidden_changes
from motet.resources.namespaces import AllowedNamespaces
from motet.resources.pool import (
    AdapterVolume,
    EngineSpec,
    PoolModel,
    ServingPool,
    ServingPoolSpec,
)
from motet.resources.template import PodTemplate
from motet.resources.validation import (
    Manifest,
    ManifestPosition,
    ManifestSet,
    Problem,
    Resource,
    files_of,
    names_manifest,
    read_all,
    read_file,
    read_text,
)

__all__ = [
    "API_VERSION",
    "CATEGORY",
    "GROUP",
    "VERSION",
    "AdapterPlacement",
    "AdapterSource",
    "AdapterVolume",
    "AllowedNamespaces",
    "EngineSpec",
    "LoRAAdapter",
    "LoRAAdapterSpec",
    "Manifest",
    "ManifestPosition",
    "ManifestSet",
    "Namespace",
    "ObjectMeta",
    "PodTemplate",
    "PoolModel",
    "PoolRef",
    "Problem",
    "Resource",
    "Secret",
    "ServingPool",
    "ServingPoolSpec",
    "files_of",
    "forbidden_changes",
    "names_manifest",
    "read_all",
    "read_file",
    "read_text",
]
