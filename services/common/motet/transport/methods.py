"""All methods of all services."""

from motet.api.v1 import predictor_pb2, runner_pb2, scheduler_pb2, supervisor_pb2
from motet.transport import DownloadMethod, StreamMethod, UnaryMethod

SERVE = StreamMethod("/motet.api.v1.Scheduler/Serve", scheduler_pb2.ServeUp, scheduler_pb2.ServeDown)
ATTACH = StreamMethod("/motet.api.v1.Scheduler/Attach", scheduler_pb2.AttachUp, scheduler_pb2.AttachDown)
SYNC = StreamMethod("/motet.api.v1.Scheduler/Sync", scheduler_pb2.SyncUp, scheduler_pb2.SyncDown)
EXPLAIN = UnaryMethod("/motet.api.v1.Scheduler/Explain", scheduler_pb2.ExplainRequest, scheduler_pb2.ExplainResponse)
SUCCEED = UnaryMethod("/motet.api.v1.Scheduler/Succeed", scheduler_pb2.SucceedRequest, scheduler_pb2.SucceedResponse)

GENERATE = StreamMethod("/motet.api.v1.Runner/Generate", runner_pb2.GenerateUp, runner_pb2.GenerateDown, encoded=True)
"""The engine's process encodes the steps."""

ASSETS = DownloadMethod("/motet.api.v1.Runner/Assets", runner_pb2.AssetsRequest, runner_pb2.AssetChunk)

WATCH = StreamMethod("/motet.api.v1.Supervisor/Watch", supervisor_pb2.WatchUp, supervisor_pb2.WatchDown)
ADVISE = StreamMethod("/motet.api.v1.Supervisor/Advise", supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown)

PREDICT = UnaryMethod("/motet.api.v1.Predictor/Predict", predictor_pb2.PredictRequest, predictor_pb2.PredictResponse)
OBSERVE = UnaryMethod("/motet.api.v1.Predictor/Observe", predictor_pb2.ObserveRequest, predictor_pb2.ObserveResponse)
EXPLAIN_ESTIMATE = UnaryMethod(
    "/motet.api.v1.Predictor/ExplainEstimate",
    predictor_pb2.ExplainEstimateRequest,
    predictor_pb2.ExplainEstimateResponse,
)

ALL = (SERVE, ATTACH, SYNC, EXPLAIN, SUCCEED, GENERATE, ASSETS, WATCH, ADVISE, PREDICT, OBSERVE, EXPLAIN_ESTIMATE)
