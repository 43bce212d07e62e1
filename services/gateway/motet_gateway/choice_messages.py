"""What the scheduler and runners are told of a choice, and what its client is told of its runner's progress. Pure."""

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet_gateway.generation import RunnerPlacement
from motet_gateway.live_choice import GenerationRequest, LiveChoice

MIN_DEADLINE_SECONDS = 1.0
"""A deadline of 0 would mean none. The answer ends at its own deadline anyway."""


def enqueue(live: LiveChoice, now: float) -> scheduler_pb2.Enqueue:
    order, generation = live.order, live.generation
    age = now - live.asked_at
    left = order.deadline_seconds if generation.delivered else max(order.deadline_seconds - age, MIN_DEADLINE_SECONDS)
    return scheduler_pb2.Enqueue(
        request=order.request,
        epoch=generation.epoch,
        tenant=order.tenant,
        group=order.group,
        adapter_digest=order.adapter_digest,
        base_digest=order.base_digest,
        adapter=order.adapter,
        request_class=order.request_class,
        prompt_tokens=len(order.prompt_ids),
        max_tokens=order.sampling.max_tokens,
        delivered_tokens=len(generation.delivered),
        estimate=order.estimate,
        deadline_seconds=left,
        whole_deadline_seconds=order.deadline_seconds,
        age_seconds=age,
        avoid=[generation.avoid] if generation.avoid else [],
        parent=order.parent,
        choices=order.choices,
        prefix_hashes=order.prefix_hints,
        key=order.key,
        admitted=live.admitted,
    )


def live_request(live: LiveChoice, placement: RunnerPlacement, now: float) -> scheduler_pb2.LiveRequest:
    order, generation = live.order, live.generation
    return scheduler_pb2.LiveRequest(
        request=order.request,
        epoch=generation.epoch,
        instance=placement.instance,
        incarnation=placement.incarnation,
        promise=placement.promise,
        tenant=order.tenant,
        group=order.group,
        adapter_digest=order.adapter_digest,
        base_digest=order.base_digest,
        adapter=order.adapter,
        request_class=order.request_class,
        prompt_tokens=len(order.prompt_ids),
        max_tokens=order.sampling.max_tokens,
        delivered_tokens=len(generation.delivered),
        age_seconds=now - live.asked_at,
        estimate=order.estimate,
        deadline_seconds=order.deadline_seconds,
        parent=order.parent,
        key=order.key,
    )


def submission(live: LiveChoice, placement: RunnerPlacement, *, with_prompt: bool = True) -> runner_pb2.Submit:
    """`with_prompt`: False if the runner has kept it."""
    order = live.order
    return runner_pb2.Submit(
        term=placement.term,
        request=order.request,
        epoch=placement.epoch,
        promise=placement.promise,
        adapter_digest=order.adapter_digest,
        base_digest=order.base_digest,
        adapter=order.adapter,
        prompt_ids=list(order.prompt_ids) if with_prompt else (),  # an array takes twice as long
        prompt_number=order.prompt_number,
        choices=[
            runner_pb2.Choice(
                choice=order.choice, delivered_ids=live.generation.delivered, scored=live.generation.scored
            )
        ],
        sampling=order.sampling,
        seed=order.seed,
        seed_is_drawn=order.seed_is_drawn,
        tenant=order.tenant,
        request_class=order.request_class,
        engines_lost=live.generation.losses.engines_lost,
        estimate=order.estimate,
        parent=order.parent,
        weight=placement.weight,
        cache_salt=order.whole_salt,
        traceparent=order.traceparent,
    )


def finished(live: LiveChoice, epoch: int, reason: "common_pb2.FinishReason.ValueType") -> scheduler_pb2.Finished:
    return scheduler_pb2.Finished(
        request=live.order.request,
        epoch=epoch,
        prompt_tokens=len(live.order.prompt_ids),
        output_tokens=live.counted_tokens,
        reason=reason,
    )


def waiting_for(progress: runner_pb2.SequenceProgress, order: GenerationRequest) -> str:
    percent = f" {progress.percent}%" if progress.percent else ""
    match progress.state:
        case common_pb2.SEQUENCE_STATE_LOADING:
            return f"loading adapter {order.adapter}{percent}"
        case common_pb2.SEQUENCE_STATE_WAITING:
            return "waiting for a batch"
        case common_pb2.SEQUENCE_STATE_PREFILL:
            return f"reading the prompt{percent}"
        case common_pb2.SEQUENCE_STATE_PARKED:
            return "parked until memory is free"
        case _:
            return ""
