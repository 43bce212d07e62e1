"""What is counted when a call ends: its metrics, and the lengths that the predictor learns from."""

import structlog

from motet.api.v1 import common_pb2, predictor_pb2
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.time_split import PartSeconds
from motet_gateway.answers.call import Call, StartedChoice
from motet_gateway.estimator import scope_name
from motet_gateway.generation import EndReason

log = structlog.get_logger(__name__)

_FINISH = {
    EndReason.STOP: common_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    None: common_pb2.FINISH_REASON_CANCELLED,
}
"""In an outcome. Choices without an end of their own were cancelled; those that failed are not reported."""


def account(call: Call, code: str) -> None:
    _count_call(call, code)
    now = call.gateway.around.clock()
    forced = call.body.options.get("ignore_eos")  # a length that is forced says nothing about the model
    for one in call.started:
        _count_choice(call, one, now)
        if not forced and one.text.error is None and one.text.tokens:
            call.gateway.estimator.observe(_outcome(call, one, now))
    log.debug(
        "request_answered",
        code=code,
        tenant=call.caller.tenant,
        adapter=call.target.adapter_name if call.target is not None else "",
        request_class=call.class_name,
        output_tokens=call.tokens,
        id=call.id,
    )


def _count_call(call: Call, code: str) -> None:
    metrics, timings, target, tokens = call.gateway.metrics, call.timings, call.target, call.tokens
    who = metrics.who(call.caller.tenant, target.adapter_name if target is not None else "")
    duration = call.gateway.around.clock() - timings.arrived
    metrics.requests.labels(*who, code).inc()
    metrics.request_duration.labels(*who).observe(duration)
    if timings.placed:
        metrics.queue_duration.labels(call.class_name).observe(timings.placed - timings.enqueued)
    if target is None:
        return
    scored = call.body.scores_only and bool(call.choices) and call.over
    if tokens or scored:
        metrics.tokens.labels(*who, "input").inc(call.prompt_tokens)
    if not tokens:
        return
    base = target.group.served_name
    metrics.tokens.labels(*who, "output").inc(tokens)
    first = timings.first_token - timings.arrived
    metrics.time_to_first_token.labels(*who).observe(first)
    metrics.vllm_time_to_first_token.labels(base).observe(first)
    metrics.vllm_request_duration.labels(base).observe(duration)
    if (most := max(choice.tokens for choice in call.choices)) > 1:
        between = (timings.last_token - timings.first_token) / (most - 1)
        metrics.time_per_output_token.labels(*who).observe(between)
        metrics.vllm_time_per_output_token.labels(base).observe(between)
    for choice in call.choices:
        if choice.finish is not None:
            metrics.vllm_success.labels(base, choice.finish).inc()


def _count_choice(call: Call, one: StartedChoice, now: float) -> None:
    by_itself = one.text.error is None and one.text.finish is EndReason.STOP
    estimated = one.order.estimate.source != LENGTH_OF_MAX_TOKENS  # so it is with ignore_eos, too
    call.gateway.metrics.answers.count(
        one.order.tenant,
        one.record,
        now=now,
        prompt_tokens=len(one.order.prompt_ids),
        answer_tokens=one.text.tokens,
        estimate=one.order.estimate if by_itself and estimated else None,
    )


def _outcome(call: Call, one: StartedChoice, now: float) -> predictor_pb2.Outcome:
    return predictor_pb2.Outcome(
        request=one.order.request,
        tenant=call.lengths_tenant,
        adapter=scope_name(one.order.adapter, one.order.base_digest),
        prompt_tokens=len(one.order.prompt_ids),
        output_tokens=one.text.tokens,
        censored=one.text.finish is not EndReason.STOP,
        estimate=one.order.estimate,
        features=one.order.features,
        feature_space=call.gateway.features.space,
        split=_split_message(one.record.split.until(now)),
        promised_tokens=one.record.promised_tokens,
        parks=one.record.parks,
        finish=_FINISH[one.text.finish],
    )


def _split_message(split: PartSeconds) -> common_pb2.TimeSplit:
    return common_pb2.TimeSplit(
        queue_seconds=split.queue,
        generation_seconds=split.generation,
        penalty_seconds=split.penalty,
        overhead_seconds=split.overhead,
    )
