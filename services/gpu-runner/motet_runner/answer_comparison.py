"""Compares answers that PEFT has given with what an engine computes, without a runner."""

from motet_runner.adapters.recorded_answers import Comparison, RecordedAnswers
from motet_runner.offline import OfflineEngine


def compare_with_engine(engine: OfflineEngine, adapter: str, given: RecordedAnswers) -> Comparison:
    """Raises AdapterIncompatible if the tokens are not this base model's."""
    given.check_vocabulary(engine.info.vocabulary)
    given.check_prompts(engine.tokenizer)
    texts = [[*answer.prompt_ids, *answer.answer_ids] for answer in given.answers]
    computed = []
    for found, answer in zip(
        engine.generate(texts, adapter=adapter, max_tokens=1, prompt_logprobs=0, progress=False),
        given.answers,
        strict=True,
    ):
        if found.error is not None:
            raise found.error
        computed.append([one.logprob for one in found.prompt_logprobs[-len(answer.answer_ids) :]])
    return given.compare(computed, engine.info.dtype)
