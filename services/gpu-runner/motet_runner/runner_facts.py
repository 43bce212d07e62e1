"""Facts that a runner tells the scheduler and the supervisor about itself."""

from dataclasses import dataclass

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet.promises import USUAL_PROMISE_QUANTILE, PromiseRule
from motet_runner.interface import EngineInfo


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """Facts that do not change while a runner's process runs."""

    identity: common_pb2.RunnerIdentity
    address: str
    info: EngineInfo
    base_digest: Digest
    asset_digest: Digest
    promise_rule: PromiseRule
    promise_quantile: int = USUAL_PROMISE_QUANTILE

    @property
    def capacity(self) -> common_pb2.Capacity:
        return self.info.capacity(self.promise_rule, self.promise_quantile).to_proto()

    @property
    def base(self) -> scheduler_pb2.BaseModel:
        return scheduler_pb2.BaseModel(
            digest=self.base_digest,
            asset_digest=self.asset_digest,
            architecture=self.info.architecture,
            vocabulary=self.info.vocabulary,
            dtype=self.info.dtype,
            device=self.info.device,
        )
