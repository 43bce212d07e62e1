"""What the design promises and nothing enforces yet. A field that does nothing would be a lie, so it is not in the
schema; offline validation answers `not yet: …` for these instead of calling them unknown. The capability that enforces
a field moves it from here into its model."""

COMING_FIELDS: dict[str, dict[str, str]] = {
    "LoRAAdapter": {
        "spec.source.image": "adapters from an OCI registry",
        "spec.source.persistentVolumeClaim": "adapters from a volume",
        "spec.source.revision": "revisions of a remote source",
        "spec.source.credentialsSecretRef": "credentials for a remote source",
        "spec.limits": "limits per adapter",
        "spec.slo": "latency targets",
        "spec.verify": "probe prompts against a reference",
    },
    "ServingPool": {
        "spec.model.revision": "revisions of a remote source",
        "spec.model.credentialsSecretRef": "credentials for a remote source",
        "spec.autoscaling": "runners that follow demand",
        "spec.tenants": "quotas and weights per tenant",
        "spec.admission": "rules for what adapters a pool takes",
        "spec.adapterVolumes": "adapters from a volume",
        "spec.slo": "latency targets",
        "spec.updateStrategy": "a choice of how runners are replaced",
        "spec.template": "pod templates",
    },
}

COMING_VALUES: dict[str, dict[str, dict[str, str]]] = {
    "ServingPool": {
        "spec.role": {
            "Prompt": "pools that only compute prompts",
            "Token": "pools that only generate tokens",
            "Offload": "pools for models larger than their device",
        },
        "spec.engine.preset": {
            "splitwise": "prompt and token phases on different runners",
            "flexgen": "models larger than their device",
        },
    },
}

COMING_SCHEMES: dict[str, str] = {
    "hf": "models from the Hugging Face Hub",
    "https": "downloads",
    "s3": "object stores",
    "oci": "OCI registries",
}
