"""What the runner knows about one digest."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.policy.effects import Check, Evict, Find
from motet_runner.adapters.policy.values import Held, Order
from motet_runner.adapters.proof import Proof, build_with
from motet_runner.adapters.recorded_answers import Comparison


@dataclass(slots=True, eq=False)
class AdapterLife:
    """An adapter's life: from its first order or request until nothing wants the adapter, or its folder leaves the disk
    cache."""

    digest: Digest
    held: Held | None = None
    """The adapter's folder, with a lease. None: the runner has no lease."""
    pending: Find | Check | Evict | None = None
    """The current effect on the folder; one at a time."""
    waiters: dict[int, str] = field(default_factory=dict)
    """Waiting request → the adapter that its client has named."""
    orders: dict[int, Order] = field(default_factory=dict)
    """Orders that have found the folder, and wait for the check or for the engine's proof."""
    generations: dict[str, int] = field(default_factory=dict)
    """The manifests that the adapter was ordered for: namespace/name → generation."""
    look: bool = False
    """The disk cache must be searched: after the last search, a request came, or the folder vanished."""
    on_device: bool = False
    in_host: bool = False
    """The engine keeps it in host memory for its next load."""
    in_engine: bool = False
    """The engine was told where the files are."""
    pinned: bool = False
    """What the engine was told last: the platform wants the adapter resident."""
    wanted_until: float = 0.0
    """A request was announced: the adapter is not evicted before this time."""
    proved_builds: tuple[str, ...] = ()
    """That have proved it on other machines, as orders have told: by `build_with`"""
    build: str = ""
    """Of this runner, without its kernels. Empty: it proves nothing."""
    drop_when_idle: bool = False
    """Forget the adapter once no request uses it."""

    @property
    def checked(self) -> Certification | None:
        return self.held.certification if self.held is not None else None

    @property
    def ready(self) -> bool:
        """True if requests may use the adapter."""
        return self.checked is not None and self.pending is None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Those of this engine that have proved the adapter, or have compared its recorded answers"""
        return () if self.checked is None else tuple(proof.kernels for proof in self.checked.proofs)

    @property
    def proved_by(self) -> tuple[str, ...]:
        """The kernels of this engine that have proved the adapter"""
        return () if self.checked is None else tuple(proof.kernels for proof in self.checked.proofs if proof.linears)

    @property
    def compared(self) -> Comparison | None:
        """The newest comparison of its recorded answers by this engine"""
        return next((one.recorded for one in reversed(self.checked.proofs)), None) if self.checked is not None else None

    @property
    def proved(self) -> bool:
        """True if an engine has proved the adapter, now or before: with any kernels, in any version"""
        return self.checked is not None and bool(self.checked.proofs or self.checked.proved_before)

    def proved_elsewhere(self, kernels: str) -> bool:
        """Whether an engine like this one has proved it on another machine, by these kernels"""
        kept = self.checked is not None and kernels in self.checked.proved_elsewhere
        return kept or (bool(self.build) and build_with(self.build, kernels) in self.proved_builds)

    @property
    def certificate(self) -> scheduler_pb2.Certificate | None:
        """With what the newest proof has found"""
        if self.checked is None:
            return None
        certificate = self.checked.certificate
        certificate.proved_by.extend(self.proved_by)
        certificate.proved_builds.extend(build_with(self.build, kernels) for kernels in self.proved_by if self.build)
        for proof in self.checked.proofs[-1:]:
            certificate.max_delta_to_base = proof.moved
            certificate.warnings.extend(proof.warnings)
            if proof.recorded is not None:
                certificate.max_delta_to_reference = proof.recorded.largest
                certificate.recorded_answers = "Agree" if proof.recorded.agrees else "Differ"
        return certificate

    @property
    def bytes(self) -> int:
        return self.held.bytes if self.held is not None else 0

    @property
    def stage(self) -> "common_pb2.AdapterStage.ValueType":
        if self.on_device:
            return common_pb2.ADAPTER_STAGE_DEVICE
        if self.checked is not None and self.in_host:
            return common_pb2.ADAPTER_STAGE_HOST
        if self.checked is not None:
            return common_pb2.ADAPTER_STAGE_CERTIFIED
        return common_pb2.ADAPTER_STAGE_UNSPECIFIED if self.held is None else common_pb2.ADAPTER_STAGE_FETCHED

    @property
    def tier(self) -> "common_pb2.MemoryTier.ValueType | None":
        """Where requests find it. None: only an order could bring it."""
        if self.drop_when_idle or self.checked is None:
            return None
        if self.on_device:
            return common_pb2.MEMORY_TIER_DEVICE
        return common_pb2.MEMORY_TIER_HOST if self.in_host else common_pb2.MEMORY_TIER_DISK

    @property
    def name(self) -> str:
        return next(iter(self.generations), self.digest)

    @property
    def refs(self) -> Iterator[common_pb2.AdapterRef]:
        for manifest, generation in self.generations.items():
            namespace, _, name = manifest.partition("/")
            yield common_pb2.AdapterRef(namespace=namespace, name=name, generation=generation)

    @property
    def idle(self) -> bool:
        """True if nothing waits for the adapter, and no effect on it is under way."""
        return not self.waiters and not self.orders and self.pending is None

    def certify(self, certification: Certification | None) -> None:
        assert self.held is not None
        self.held = replace(self.held, certification=certification)

    def add_proof(self, proof: Proof) -> None:
        if self.checked is not None:
            others = (one for one in self.checked.proofs if one.kernels != proof.kernels)
            self.certify(replace(self.checked, proofs=(*others, proof)))
