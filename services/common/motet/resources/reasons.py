"""Every reason that a condition may give, what it means and what to do. Reasons are an API: programs compare them."""

from collections.abc import Mapping

Reasons = Mapping[str, str]

_WAITING = {
    "WaitingForRunner": "No runner of the pool is ready. Look at the pool: `kubectl describe spool NAME`.",
    "Checking": "A runner fetches the bytes and checks them. Wait; large downloads take their time.",
}
_FETCHING = {
    "FetchFailed": "The source cannot be read: the message says what it answered. It is tried again by itself; correct "
    "`spec.source` if it never can work.",
    "CredentialsInvalid": "The source, or the Secret that opens it, refuses us. Correct the Secret, or grant it to the "
    "pool's runners as the message says.",
    "DigestMismatch": "The bytes are not those that `spec.source.digest` names. Correct the digest or the source.",
    "FormatRejected": "The folder is no PEFT adapter with safetensors, or its values are not numbers. Save it again.",
    "TooLarge": "The adapter is larger than the pool takes (`spec.admission.maxAdapterSizeBytes`) or has room for.",
    "RankTooLarge": "Its rank is above the pool's `spec.engine.maxLoraRank`. Train a smaller one or ask for more.",
    "NoSpace": "The runner's disk is full. It is tried again; give the runners a larger cache if it stays so.",
}
_CERTIFYING = {
    "UnknownField": "`adapter_config.json` has a field that Motet does not reproduce; the message names it.",
    "UnmappedTensors": "Some tensors belong to no layer of the base model. The adapter was made for another model, or "
    "its configuration does not name all layers.",
    "ShapeMismatch": "Tensors do not have the shapes of the base model's layers. Use the model it was trained on.",
    "NoEffect": "The adapter changes nothing: all of it is zero. It was saved before training, or in the wrong way.",
    "ReferenceMismatch": "What a runner computes with it differs from the reference. Report it; it does not serve.",
}
_REFUSED = {
    "PoolNotFound": "No pool has that group name. Correct `spec.poolRef`, or wait for the pool: the order of applying "
    "does not matter.",
    "NamespaceNotAllowed": "The pool takes no adapters from this namespace. Ask the platform team to admit it in "
    "`spec.allowedNamespaces`, or to label the namespace.",
    "BaseModelMismatch": "`spec.baseModel` is not what the pool serves. Choose a pool with that model, or create the "
    "adapter anew with another claim.",
    "NameConflict": "An older adapter of this namespace has the model name. Set another `spec.modelName`.",
    "QuotaExceeded": "The pool is full (`spec.admission.maxAdapters`). Delete an older adapter or ask for more room.",
    "PolicyDenied": "The pool does not take bytes from there, or not without a digest. The message names the rule.",
    "Unreadable": "The object was stored under other rules than today's. Apply it again; the message names the field.",
}
_LOADING = {
    "Loading": "Fewer runners hold it than `spec.placement.minReplicas` asks for. More are loading it.",
    "NoCapacity": "The pool has fewer ready runners than `spec.placement.minReplicas` asks for; those that there are "
    "serve it. Raise the pool's replicas, or lower `spec.placement.minReplicas`.",
    "Suspended": "`spec.suspend` is true. Set it to false to serve.",
}

ADAPTER_REASONS: Mapping[str, Reasons] = {
    "Ready": {
        "Serving": "A request is served now.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
        **_CERTIFYING,
        "Suspended": _LOADING["Suspended"],
    },
    "Accepted": {"Valid": "The pool takes it.", **_REFUSED},
    "ArtifactReady": {
        "Verified": "The bytes are here, and digest and format are right.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
    },
    "Certified": {
        "FitsBaseModel": "Every tensor has its place in the base model.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
        **_CERTIFYING,
    },
    "Loaded": {
        "Resident": "Runners hold it in device memory.",
        "OnDemand": "It loads at its next request.",
        "WaitingForRunner": _WAITING["WaitingForRunner"],
        **_REFUSED,
        **_LOADING,
    },
}
"""By condition. `Reconciling` and `Stalled` repeat the reason of the condition that they are about."""

_POOL_REFUSED = {
    "NamespaceNotPrepared": "The operator may not run anything in this namespace. Add it to the chart's value "
    "`pools.namespaces` and upgrade the release.",
    "ModelMismatch": "An older pool of the group serves another base model. Use the same model or another group.",
    "Unreadable": _REFUSED["Unreadable"],
}
_RUNNERS = {
    "RunnersStarting": "Runners are loading the base model. The first start also downloads it.",
    "PermissionDenied": "The operator lacks a right; the message names verb and resource. Give it back (`helm upgrade` "
    "does); nothing has to be restarted.",
    "RunnersRefused": "The API server refuses the pool's Deployment or its pods: a quota, an admission policy, Pod "
    "Security, a ServiceAccount that is missing. The message has its words; nothing has to be restarted.",
    "NameTaken": "An object that somebody else has made has the name of one that the operator makes for the pool. It "
    "is left as it is; the message names it. Delete it, or give the pool another name; nothing has to be restarted.",
    "RunnerFailing": "A runner dies again and again; the message has its last words, and `kubectl logs --previous` all "
    "of them.",
    "WaitingForTurn": "There is a new revision, and as many pools as may are on their way to theirs "
    "(`MOTET_CLUSTER_ROLLING_POOLS`), or this one has changed too often of late (`MOTET_CLUSTER_ROLLOUT_SECONDS`). "
    "Until then the runners that there are serve on.",
}

POOL_REASONS: Mapping[str, Reasons] = {
    "Ready": {
        "AllRunnersReady": "Every wanted runner serves with the newest revision.",
        "ScaledToZero": "No runner is wanted now. A request (mode Builtin) or a larger `spec.replicas` brings one.",
        **_RUNNERS,
        **_POOL_REFUSED,
    },
    "Accepted": {"Valid": "The pool may run.", **_POOL_REFUSED},
    "Available": {
        "RunnersReady": "At least one runner serves.",
        "NoRunners": "No runner exists. See `Progressing`, and `kubectl get deployments,pods` in the pool's namespace.",
        "RunnersNotReady": "Runners exist and none serves yet; the message says what the last of them said.",
        "PermissionDenied": _RUNNERS["PermissionDenied"],
        "RunnersRefused": _RUNNERS["RunnersRefused"],
        "NameTaken": _RUNNERS["NameTaken"],
    },
    "Progressing": {
        "Complete": "Nothing is left to do.",
        "RollingOut": "Runners of a new revision take the place of old ones.",
        "RunnersMoving": "Nodes with runners are cordoned, or tainted by an autoscaler that empties them. Each of "
        "these runners leaves once another serves elsewhere.",
        "ScalingDown": "Runners are leaving; they finish what they have first.",
        **_RUNNERS,
    },
    "AdaptersHealthy": {
        "NoneFailed": "No adapter has failed.",
        "AdaptersFailed": "Some adapters cannot be served; their own conditions say why.",
    },
    "ScalingActive": {
        "ScalingDisabled": "A person decides: `spec.replicas`, or `--runners` locally.",
        "FollowingDemand": "The scheduler's advice decides; the message has its reason.",
        "AtMinimum": "Demand asks for fewer than `spec.autoscaling.minReplicas`.",
        "AtMaximum": "Demand asks for more than `spec.autoscaling.maxReplicas`. Raise it if requests wait.",
        "External": "Somebody writes `spec.replicas` through the scale subresource, and it is followed.",
        "HoldingStaleAdvice": "The scheduler has not said what is needed, or not lately; nothing leaves meanwhile.",
        "HoldingForRollout": "Fewer would do; none leaves until the rollout is complete.",
        "ConflictingManager": "Mode is Builtin and somebody else writes `spec.replicas`. Set mode to External, or "
        "remove the other writer as the message says.",
    },
}
