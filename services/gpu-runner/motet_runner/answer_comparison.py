"""Compares an adapter's recorded answers with what the engine computes, without a runner."""

from dataclasses import asdict, replace

from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.recorded_answers import Comparison, RecordedAnswers
from motet_runner.interface import EngineConfig
from motet_runner.offline import OfflineEngine

ADAPTER = "recorded"


def compare_with_engine(config: EngineConfig, layout: AdapterLayout, recorded: RecordedAnswers) -> Comparison:
    """Loads the base model. Torch's kernels compute: nothing is compiled for a few answers. Raises AdapterIncompatible
    if the tokens are not this base model's."""
    options = asdict(replace(config, kernels="torch", max_resident_adapters=1, max_concurrent_sequences=1))
    engine = OfflineEngine(options.pop("model"), **options)
    recorded.check_vocabulary(engine.info.vocabulary)
    recorded.check_prompts(engine.tokenizer)
    engine.add_certified(ADAPTER, layout)
    texts = [[*answer.prompt_ids, *answer.answer_ids] for answer in recorded.answers]
    computed = []
    for found, given in zip(
        engine.generate(texts, adapter=ADAPTER, max_tokens=1, prompt_logprobs=0, progress=False),
        recorded.answers,
        strict=True,
    ):
        if found.error is not None:
            raise found.error
        computed.append([one.logprob for one in found.prompt_logprobs[-len(given.answer_ids) :]])
    return recorded.compare(computed, engine.info.dtype)
