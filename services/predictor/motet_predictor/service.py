"""The predictor's calls. Predict answers from memory, Observe learns at once; the database is written later."""

import asyncio
from typing import Protocol

import structlog

from motet.api.v1 import common_pb2, predictor_pb2
from motet.clock import Clock
from motet.store.length_samples import LengthSample
from motet.transport import Handlers
from motet.transport.methods import EXPLAIN_ESTIMATE, OBSERVE, PREDICT
from motet_predictor.explanation import explain
from motet_predictor.learned_requests import LearnedRequests
from motet_predictor.length_model import LengthEstimate, LengthModel
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import Asked, PromptModel
from motet_predictor.sample_features import Features, features_of, to_bytes
from motet_predictor.settings import Settings
from motet_predictor.versions import Change

log = structlog.get_logger(__name__)

_SOURCE = "model:"
_TENANT, _ADAPTER, _REQUEST = 253, 512, 128
_ROOM_OF_ANSWER = 64
"""Bytes of a sample for the request's name and the estimate's source, which differ from answer to answer. A refit tells
prompts apart by their features, so these must not decide how many of them are kept."""
PROMPTS_TOGETHER = 64
"""Of one call: it bounds the memory that their distributions take."""
MIN_REST_SECONDS, MAX_REST_SECONDS = 0.001, 0.004
"""Between two outcomes of a call. A Predict takes several turns of the event loop, about 2 ms, and must be in time:
without a rest, an outcome or a part of a write takes its time before each of them."""
RESTS_OF_CALL_SECONDS = 0.064
"""All rests of a call together, if they may be so short: its gateway sends one call after the other."""
OBSERVE_SECONDS = 0.25
"""A call that takes longer ends, and its answer says how many outcomes were learned. Where all gateways send what they
have kept, no call takes so long that its gateway no longer waits for the answer."""
_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def rest_between(outcomes: int) -> float:
    return min(max(MIN_REST_SECONDS, RESTS_OF_CALL_SECONDS / max(1, outcomes)), MAX_REST_SECONDS)


class KeepsSamples(Protocol):
    async def recalled(self) -> None:
        """Returns when it is known what was learned before, or that the database cannot say it now."""

    def add(self, sample: LengthSample) -> None: ...


def empty_model(settings: Settings, metrics: Metrics) -> PromptModel:
    """What a predictor with these settings begins with."""
    model = PromptModel(LengthModel(max_scopes=settings.max_scopes), max_adapters=settings.max_scopes)
    metrics.weights_made.set_function(lambda: model.serving.made)
    return model


class PredictorService:
    def __init__(
        self, model: PromptModel, samples: KeepsSamples, metrics: Metrics, clock: Clock, learned: LearnedRequests
    ) -> None:
        self._model = model
        self._samples = samples
        self._metrics = metrics
        self._clock = clock
        self._learned = learned
        self._ignored_by = ""

    @property
    def handlers(self) -> Handlers:
        return {PREDICT: self._predict, OBSERVE: self._observe, EXPLAIN_ESTIMATE: self._explain}

    async def _predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        started = self._clock()
        serving = self._model.serving.name
        response = predictor_pb2.PredictResponse(model_version=serving)
        prompts = request.prompts
        for start in range(0, len(prompts), PROMPTS_TOGETHER):
            some = prompts[start : start + PROMPTS_TOGETHER]
            found = self._model.estimates([self._asked(one) for one in some], [one.max_tokens for one in some])
            response.estimates.extend(_estimate(lengths, _SOURCE + serving) for lengths in found)
        self._metrics.estimates.inc(len(prompts))
        self._metrics.predict_seconds.observe(self._clock() - started)
        return response

    async def _observe(self, request: predictor_pb2.ObserveRequest) -> predictor_pb2.ObserveResponse:
        rest, until = rest_between(len(request.outcomes)), self._clock() + OBSERVE_SECONDS
        try:
            async with asyncio.timeout(OBSERVE_SECONDS):
                await self._samples.recalled()
        except TimeoutError:
            return predictor_pb2.ObserveResponse()  # they are sent again
        accepted = 0
        for outcome in request.outcomes:
            accepted += 1
            name = _text(outcome.request, _REQUEST)
            if name in self._learned:
                continue
            tenant, adapter = _text(outcome.tenant, _TENANT), _text(outcome.adapter, _ADAPTER)
            features = features_of(outcome.features)
            change = self._model.observe(
                tenant,
                adapter,
                outcome.output_tokens,
                censored=outcome.censored,
                features=features,
                space=outcome.feature_space,
            )
            self._learned.add(name)
            self._count_coverage(outcome)
            if change is not None:
                self._report(change)
            self._samples.add(_sample(outcome, features))
            self._metrics.outcomes.labels("true" if outcome.censored else "false").inc()
            await asyncio.sleep(rest)
            if self._clock() >= until:
                break
        self._metrics.scopes.set(len(self._model.lengths))
        return predictor_pb2.ObserveResponse(accepted=accepted)

    async def _explain(self, request: predictor_pb2.ExplainEstimateRequest) -> predictor_pb2.ExplainEstimateResponse:
        prompt = request.prompt
        tenant, adapter = _text(prompt.tenant, _TENANT), _text(prompt.adapter, _ADAPTER)
        asked = Asked(tenant, adapter, features_of(prompt.features), prompt.feature_space)
        found = explain(self._model, asked, prompt.max_tokens)
        source = _SOURCE + self._model.serving.name
        return predictor_pb2.ExplainEstimateResponse(
            steps=[
                predictor_pb2.EstimateStep(what=what, estimate=_estimate(lengths, source))
                for what, lengths in found.steps
            ],
            moves=[predictor_pb2.FeatureMove(feature=feature, factor=factor) for feature, factor in found.moves],
            answers=found.answers,
            trust=found.trust,
            features_known=found.known,
        )

    def _asked(self, prompt: predictor_pb2.Prompt) -> Asked:
        serving, features = self._model.serving, features_of(prompt.features)
        if len(features) and serving.weights is not None and not serving.knows(prompt.feature_space):
            self._metrics.features_ignored.inc()
            self._report_ignored(serving.name)
        tenant, adapter = _text(prompt.tenant, _TENANT), _text(prompt.adapter, _ADAPTER)
        return Asked(tenant, adapter, features, prompt.feature_space)

    def _report_ignored(self, version: str) -> None:
        """Once for each version, not for each prompt."""
        if version != self._ignored_by:
            self._ignored_by = version
            log.warning(
                "features_ignored",
                version=version,
                reason="its weights were fitted to features of another key or version",
                hint="It estimates by running statistics. After a change of the key, the next refits make up for it.",
            )

    def _report(self, change: Change) -> None:
        self._metrics.version_changes.labels(change.why.value).inc()
        log.info(
            "version_decided",
            version=change.version.name,
            why=change.why.value,
            answers=change.answers,
            gain=round(change.gain.mean, 5),
            error=round(change.gain.error, 5),
            serving=self._model.serving.name,
        )

    def _count_coverage(self, outcome: predictor_pb2.Outcome) -> None:
        """Count how often our quantiles were right. Cut answers and estimates of other sources do not count."""
        estimate = outcome.estimate
        if outcome.censored or not estimate.source.startswith(_SOURCE):
            return
        self._metrics.judged.inc()
        quantiles = {"0.5": estimate.q50, "0.8": estimate.q80, "0.9": estimate.q90, "0.95": estimate.q95}
        for quantile, tokens in quantiles.items():
            if outcome.output_tokens <= tokens:
                self._metrics.covered.labels(quantile).inc()


def _estimate(lengths: LengthEstimate, source: str) -> common_pb2.Estimate:
    return common_pb2.Estimate(
        q50=lengths.q50,
        q80=lengths.q80,
        q90=lengths.q90,
        q95=lengths.q95,
        rank=lengths.expected,
        source=source,
    )


def _text(text: str, max_length: int) -> str:
    """Fit text into its column: cut it to the length, and replace NUL, which PostgreSQL does not accept."""
    return text[:max_length].replace("\0", "\N{REPLACEMENT CHARACTER}")


def _bytes(*names: str) -> int:
    return sum(len(name.encode()) for name in names)


def _sample(outcome: predictor_pb2.Outcome, features: Features) -> LengthSample:
    request, source = _text(outcome.request, _REQUEST), _text(outcome.estimate.source, 128)
    tenant, adapter = _text(outcome.tenant, _TENANT), _text(outcome.adapter, _ADAPTER)
    beside = max(_ROOM_OF_ANSWER, _bytes(request, source)) + _bytes(tenant, adapter)
    return LengthSample(
        request=request,
        tenant=tenant,
        adapter=adapter,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        censored=outcome.censored,
        estimated_q50=outcome.estimate.q50,
        estimated_q95=outcome.estimate.q95,
        estimate_source=source,
        estimated_q80=outcome.estimate.q80,
        estimated_q90=outcome.estimate.q90,
        promised_tokens=outcome.promised_tokens,
        parks=outcome.parks,
        finish=_FINISH.get(outcome.finish, ""),
        features=to_bytes(outcome.feature_space, features, beside=beside),
    )
