"""Fields and values that are planned, but that Motet does not enforce yet. A field without effect would mislead users,
so it is not in the schema. For the names here, offline validation answers `not yet: …` instead of calling them unknown.
When you add the code that enforces a field, move it from here into its model."""

PLANNED_FIELDS: dict[str, dict[str, str]] = {
    "LoRAAdapter": {
        "spec.slo": "latency targets",
    },
    "ServingPool": {
        "spec.slo.ttftMilliseconds": "targets for the first token",
        "spec.template.volumes": "further volumes of pods",
        "spec.template.resourceClaims": "devices by claim",
    },
}

PLANNED_VALUES: dict[str, dict[str, dict[str, str]]] = {
    "ServingPool": {
        "spec.role": {
            "Prompt": "pools that only compute prompts",
            "Token": "pools that only generate tokens",
            "Offload": "pools for models larger than their device",
        },
        "spec.engine.backend": {"sglang": "SGLang as the engine of a runner"},
        "spec.engine.preset": {
            "splitwise": "prompt and token phases on different runners",
            "flexgen": "models larger than their device",
        },
    },
}
