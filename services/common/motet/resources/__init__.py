"""The custom resources of Motet (`motet.dev/v1alpha1`), once: these models validate manifests offline, are what
reconcile sees, and are what the CRDs are generated from.

A field is here when something enforces it; `coming` lists those that nothing enforces yet.
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
    "read_all",
    "read_file",
    "read_text",
]
