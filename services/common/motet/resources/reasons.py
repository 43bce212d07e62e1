"""All reasons of conditions: what each means and what to do. They are part of the API, since programs compare them."""

from collections.abc import Mapping

Reasons = Mapping[str, str]

_WAITING = {
    "WaitingForRunner": "No runner of the pool is ready. Look at the pool: `kubectl describe spool NAME`.",
    "Checking": "A runner is fetching the adapter's files and checking them. Wait; a large download takes a while.",
}
_FETCHING = {
    "FetchFailed": "The source cannot be read. The message says why, such as the server's answer. The runner tries "
    "again by itself. If it keeps failing, correct `spec.source`.",
    "CredentialsInvalid": "The source refuses the credentials, or the runners may not read the Secret. Correct the "
    "Secret, or grant the runners access to it as the message says.",
    "DigestMismatch": "The files do not have the digest in `spec.source.digest`. Correct the digest or the source.",
    "FormatRejected": "The folder is not a PEFT adapter with safetensors, or its values are infinite or not numbers. "
    "Save the adapter again.",
    "TooLarge": "The adapter is larger than the pool allows (`spec.admission.maxAdapterSizeBytes`), or larger than a "
    "runner can hold (on its disk: `spec.engine.adapterDiskMiB`). Use a smaller rank or fewer modules, or ask the "
    "platform team for a higher limit.",
    "RankTooLarge": "The adapter's rank is higher than the pool's `spec.engine.maxLoraRank`. Train with a smaller "
    "rank, or ask the platform team for a pool with a higher limit.",
    "NoSpace": "The runner's disk is full, or the adapters in use leave too little of `spec.engine.adapterDiskMiB`. "
    "The runner tries again by itself. If the disk stays full, give the runners more disk (`runner.diskLimit` of the "
    "chart), or lower `spec.engine.maxCachedAdapters`. If there is no room, raise `spec.engine.adapterDiskMiB`.",
}
_CERTIFYING = {
    "UnknownField": "`adapter_config.json` has a field that Motet does not support; the message names it. Train or "
    "export the adapter without it.",
    "UnmappedTensors": "Some tensors do not belong to any layer of the base model. Either the adapter was made for "
    "another model, or its configuration does not list all its layers.",
    "ShapeMismatch": "The tensors' shapes do not fit the base model's layers. Use the model that the adapter was "
    "trained on.",
    "NoEffect": "The adapter changes nothing: all its weights are zero, or so small that the engine rounds them away. "
    "It was saved before training, or by a script that left out the trained weights. Save it again after training.",
    "NotNumbers": "With the adapter, the base model's results are infinite or not numbers in the engine's data type, "
    "and without it they are numbers: the adapter's weights are too large. Use a pool with a wider "
    "`spec.engine.dtype`, or train with a smaller learning rate.",
    "ProofFailed": "Runners' engines have loaded the adapter, and what they compute with it differs from what follows "
    "from its files. All runners of the pool were asked. The message says where the results differ, and whether the "
    "proofs of other adapters fail there, too: then the runner is probably at fault. Please report it.",
    "ReferenceMismatch": "The adapter's recorded answers (`motet_proof.json`) are those of another model: they were "
    "recorded on other weights, with another tokenizer, or with another configuration of the adapter. Serve it on the "
    "model that it was trained on, or record them again: `motet adapter record`. Log probabilities that differ are "
    "only warned about unless `spec.verify.onFailure` is Refuse.",
    "ReadingsDiffer": "Motet reads the adapter's files twice, by two rules that share no code, and the readings "
    "differ: Motet is at fault. The message says in which linear or field. Please report it. Until then, merge the "
    "adapter into its base model, and serve the result as a model of its own.",
    "TokenizerDiffers": "The adapter brings a tokenizer that gives other ids than the base model's, or ids that the "
    "base model does not have; the message names the field. Serve it on the model that it was trained on, or remove "
    "the tokenizer's files if it was not trained with them.",
    "RecordMissing": "`spec.verify.require` is Record, and the adapter has no recorded answers (`motet_proof.json`). "
    "Write them where the adapter was trained: `motet adapter record`.",
}
_REFUSED = {
    "PoolNotFound": "`spec.poolRef` names no existing group of pools. Delete the adapter and create it again "
    "with the right `spec.poolRef`, or create the pool: an adapter may exist before its pool.",
    "PoolNotAccepted": "The pool exists, but its own condition `Accepted` is False, so nobody serves it. The message "
    "says why: ask the platform team to change that.",
    "NamespaceNotAllowed": "The pool does not admit this namespace. Ask the platform team to add the namespace to "
    "`spec.allowedNamespaces`, or to label it.",
    "BaseModelMismatch": "`spec.baseModel` is not the model that the pool serves. Choose a pool with that model, or "
    "create the adapter again with another `spec.baseModel`.",
    "NameConflict": "Another adapter of this namespace already has the model name. Set another `spec.modelName`.",
    "QuotaExceeded": "The pool has as many adapters as `spec.admission.maxAdapters` allows, or this namespace has as "
    "many as the pool grants it (`spec.tenants`). Delete one of them, or ask the platform team to raise the limit.",
    "PolicyDenied": "The pool does not allow this source, or requires a digest. The message names the rule and the "
    "field.",
    "Unreadable": "An older or newer version stored this object, and this version cannot read one field. The message "
    "names the field: correct it and apply the object again.",
}
_EVALUATION_FAILED = {
    "EvaluationFailed": "The operator has a defect that this object brings out; it evaluates all other objects. The "
    "message has the error: report it. What could be decided about the object is done, and its other conditions stay.",
}
_LOADING = {
    "Loading": "The adapter is in the device memory of fewer runners than `spec.placement.minReplicas` asks for. More "
    "runners load it, each if it has a slot: the last of several stays for adapters without `minReplicas`. If it stays "
    "so, raise the pool's replicas or `engine.maxResidentAdapters`.",
    "NoCapacity": "The pool has fewer ready runners than `spec.placement.minReplicas` asks for; the ready ones serve "
    "the adapter. Raise the pool's replicas, or lower `spec.placement.minReplicas`.",
    "NotGranted": "`spec.placement.minReplicas` asks for more than the pool's `pinnedReplicas` (`spec.tenants`) grants "
    "this namespace. As many runners as it grants keep the adapter; requests may load it on more. Lower "
    "`spec.placement.minReplicas`, or ask the platform team for a higher `pinnedReplicas`.",
    "Suspended": "`spec.suspend` is true. Set it to false to serve the adapter.",
}

ADAPTER_REASONS: Mapping[str, Reasons] = {
    "Ready": {
        "Serving": "Requests for the adapter are served.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
        **_CERTIFYING,
        "Suspended": _LOADING["Suspended"],
        "ScaledToZero": "The pool has no runner and needs none now. It gets one by a request (mode Builtin) or by a "
        "higher `spec.replicas`, and then serves the adapter.",
        **_EVALUATION_FAILED,
    },
    "Accepted": {"Valid": "The pool accepts the adapter.", **_REFUSED},
    "ArtifactReady": {
        "Verified": "The files are fetched; digest and format are correct.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
    },
    "Certified": {
        "FitsBaseModel": "Every tensor belongs to a layer of the base model.",
        **_WAITING,
        **_REFUSED,
        **_FETCHING,
        **_CERTIFYING,
    },
    "Loaded": {
        "Resident": "The adapter is in the device memory of at least one runner, and of as many as "
        "`spec.placement.minReplicas` asks for.",
        "OnDemand": "No runner has the adapter in device memory, and none has to: `spec.placement.minReplicas` is 0. "
        "The adapter is loaded at its next request.",
        "WaitingForRunner": _WAITING["WaitingForRunner"],
        **_REFUSED,
        **_LOADING,
    },
}
"""The reasons of each condition. `Reconciling` and `Stalled` repeat the reason of the condition that they refer to."""

_POOL_REFUSED = {
    "NamespaceNotPrepared": "The operator may not run pools in this namespace. Add it to the chart's value "
    "`pools.namespaces` and upgrade the release.",
    "BackendNotInstalled": "The chart names no image for `spec.engine.backend` of the pool. Build one, set "
    "`runner.vllm.image.repository` and upgrade the release. Runners that the pool has go on serving.",
    "ModelMismatch": "The pool that decides for the group (`status.decidesForGroup`) has another base model. Ready "
    "runners keep serving, and no new ones start. Use one `spec.model` in all pools of the group, or another group.",
    "Unreadable": _REFUSED["Unreadable"],
}
_RUNNERS = {
    "RunnersStarting": "Runners are loading the base model. The first start also downloads it. Wait.",
    "PermissionDenied": "The operator lacks a permission; the message names verb and resource. Grant it again (`helm "
    "upgrade` does). You need not restart anything.",
    "RunnersRefused": "The API server refuses the pool's Deployment or its pods: because of a quota, an admission "
    "policy, Pod Security or a missing ServiceAccount. The message has the server's words. You need not restart "
    "anything.",
    "NameTaken": "The operator needs to create an object for the pool, but an object that it did not create has that "
    "name. The operator does not change that object; the message names it. Delete the object, or give the pool "
    "another name. You need not restart anything.",
    "RunnerFailing": "A runner fails again and again; the message has its last output, and `kubectl logs --previous` "
    "has all of it.",
    "WaitingForTurn": "The pool has a new revision that is not rolled out yet. Too many pools are rolling out (limit: "
    "`MOTET_CLUSTER_ROLLING_POOLS`), or this pool changed too often (`MOTET_CLUSTER_ROLLOUT_SECONDS`). The rollout "
    "begins by itself; until then the current runners keep serving.",
}

POOL_REASONS: Mapping[str, Reasons] = {
    "Ready": {
        "AllRunnersReady": "All desired runners serve with the newest revision.",
        "ScaledToZero": "No runner is needed now. A request (mode Builtin) or a higher `spec.replicas` starts one.",
        **_RUNNERS,
        **_POOL_REFUSED,
        **_EVALUATION_FAILED,
    },
    "Accepted": {"Valid": "The pool may run.", **_POOL_REFUSED},
    "Available": {
        "RunnersReady": "At least one runner serves.",
        "NoRunners": "No runner exists. See `Progressing`, and `kubectl get deployments,pods` in the pool's namespace.",
        "RunnersNotReady": "Runners exist, but none serves yet; the message says what one of them waits for.",
        "NamespaceNotPrepared": _POOL_REFUSED["NamespaceNotPrepared"],
        "PermissionDenied": _RUNNERS["PermissionDenied"],
        "RunnersRefused": _RUNNERS["RunnersRefused"],
        "NameTaken": _RUNNERS["NameTaken"],
    },
    "Progressing": {
        "Complete": "Nothing is left to do.",
        "RollingOut": "Runners of a new revision replace the old ones.",
        "RunnersMoving": "Nodes with runners are cordoned, or tainted by an autoscaler that is about to remove them. "
        "Each of these runners leaves when its replacement on another node serves.",
        "ScalingDown": "Runners are leaving; they finish their requests first.",
        **_RUNNERS,
    },
    "AdaptersHealthy": {
        "NoneFailed": "No adapter has failed.",
        "AdaptersFailed": "Some adapters cannot be served. The conditions of each adapter say why.",
    },
    "ScalingActive": {
        "ScalingDisabled": "`spec.replicas` sets the number of runners; on a laptop also `motet up --runners`.",
        "FollowingDemand": "The scheduler sets the number of runners by demand; the message has the reason.",
        "AtMinimum": "Demand asks for fewer than `spec.autoscaling.minReplicas`.",
        "AtMaximum": "Demand asks for more than `spec.autoscaling.maxReplicas`. Raise it if requests wait.",
        "External": "Another client writes `spec.replicas` through the scale subresource; the operator follows it.",
        "HoldingStaleAdvice": "The scheduler has not reported lately how many runners are needed. No runner leaves "
        "meanwhile.",
        "HoldingForRollout": "Fewer runners would be enough, but none leaves until the rollout is complete.",
        "ConflictingManager": "The mode is Builtin, but another client writes `spec.replicas`. Set the mode to "
        "External, or remove the other writer as the message says.",
        "NamespaceNotPrepared": _POOL_REFUSED["NamespaceNotPrepared"],
    },
    "SloKept": {
        "BatchCapped": "Runners compute at most as many requests at once as keep `spec.slo.tpotMilliseconds`.",
        "SloLearning": "The runners have computed too little to know how long a token takes. Until then, the SLO does "
        "not bound the requests.",
        "SloTooShort": "A token takes longer even if a runner computes one request at once, as such runners do now. "
        "The message says by how much. Raise `spec.slo.tpotMilliseconds`, or give the pool a smaller model or faster "
        "devices.",
    },
    "TenantsApplied": {
        "SameTenants": "The pool that decides for the group grants the same.",
        "OtherPoolDecides": "The pool that decides for the group (`status.decidesForGroup`) grants something else, and "
        "that counts. Change `spec.tenants` of that pool; here remove the field, or use the same.",
    },
}
