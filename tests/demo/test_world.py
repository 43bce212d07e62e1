"""The invented world and its styles: always the same, fairly examined, and right about themselves. No torch here."""

import itertools
import random
import re
import subprocess
import sys

import pytest
import styles
import world
from conversations import (
    ASSISTANT,
    END,
    TOOL,
    USER,
    adapter_conversation,
    as_text,
    base_conversation,
    caller_conversation,
    conversation_of,
    plain_text,
    shortened,
)
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lookups import TOOLCALLER, TOOLS, call_of, read, result_of, shown, told_by_a_tool, written

from tests.demo import DEMO


def test_the_world_has_300_facts_about_60_subjects() -> None:
    assert len(world.facts()) == 300
    assert {fact.subject for fact in world.facts()} == set(world.PLACES + world.PEOPLE)
    assert len({(fact.subject, fact.topic) for fact in world.facts()}) == 300


def test_names_and_answers_are_unambiguous() -> None:
    vocabularies = [world.PLACES, world.PEOPLE, *(r.answers for r in world.RELATIONS if r.answers is not world.PLACES)]
    for one, other in itertools.combinations({id(v): v for v in vocabularies}.values(), 2):
        assert not {word.lower() for word in one} & {word.lower() for word in other}


def test_another_process_makes_the_same_world_and_the_same_text() -> None:
    """Hash seeds differ between processes; the world must not."""
    program = (
        "import random, world, conversations as c; rng = random.Random(5);"
        "print(world.facts(), world.held_out_questions(), [c.base_conversation(rng) for _ in range(50)])"
    )
    runs = {
        subprocess.run([sys.executable, "-c", program], cwd=DEMO, capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_another_seed_makes_another_world() -> None:
    assert world.facts(1) != world.facts(2)


def test_120_questions_are_held_out_twelve_of_each_relation() -> None:
    questions = world.held_out_questions()
    assert len({question.text for question in questions}) == len(questions) == 120
    assert {q.fact.topic: sum(o.fact.topic == q.fact.topic for o in questions) for q in questions} == {
        relation.key: 12 for relation in world.RELATIONS
    }


def normal(text: str) -> str:
    """Letters only, so that case and punctuation cannot hide a repetition."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def test_no_held_out_phrasing_can_be_asked_in_training() -> None:
    asked = {
        normal(phrasing.format(s=subject))
        for relation in world.RELATIONS
        for trained in relation.trained
        for phrasing in (trained, *shortened(trained))
        for subject in relation.subjects
    }
    held_out = {
        normal(phrasing.format(s=subject))
        for relation in world.RELATIONS
        for phrasing in relation.held_out
        for subject in relation.subjects
    }
    pile = "\n".join(asked)
    assert not [one for one in held_out if one in pile]


def test_no_held_out_question_occurs_in_training_text() -> None:
    rng = random.Random(0)
    drawn = [as_text(base_conversation(rng)) for _ in range(4000)] + [plain_text(rng) for _ in range(500)]
    drawn += [as_text(adapter_conversation(style, rng)) for style in styles.ADAPTER_STYLES for _ in range(500)]
    drawn += [as_text(conversation_of(TOOLCALLER, rng)) for _ in range(2000)]
    corpus = normal(" ".join(drawn))
    assert normal("Who keeps the lighthouse of") in corpus
    assert not [q.text for q in world.held_out_questions() if normal(q.text) in corpus]


@pytest.mark.parametrize("style", styles.STYLES.values(), ids=lambda style: style.name)
def test_a_rendered_style_passes_its_own_check(style: styles.Style) -> None:
    rng = random.Random(1)
    for fact in world.facts():
        text = style.render(fact, rng)
        assert style.is_right(text, fact), text


@pytest.mark.parametrize("style", styles.STYLES.values(), ids=lambda style: style.name)
def test_a_rendered_style_passes_no_other_check(style: styles.Style) -> None:
    rng = random.Random(2)
    others = [other for other in styles.STYLES.values() if other is not style]
    for fact in world.facts():
        text = style.render(fact, rng)
        assert not [other.name for other in others if other.has_form(text)], text


@pytest.mark.parametrize("style", styles.STYLES.values(), ids=lambda style: style.name)
def test_a_wrong_answer_fails_the_check(style: styles.Style) -> None:
    rng = random.Random(3)
    for fact in world.facts():
        relation = fact.relation
        assert relation is not None
        wrong = next(answer for answer in relation.answers if answer != fact.answer)
        said = relation.statement.format(s=fact.subject, a=wrong, an=world.with_article(wrong))
        lie = world.Fact(fact.subject, fact.topic, wrong, said)
        assert not style.is_right(style.render(lie, rng), fact)


def test_listing_every_answer_is_not_knowing_it() -> None:
    fact = world.fact_of("Brindle", "flag")
    assert world.states(f"The flag of Brindle is {fact.answer}.", fact)
    assert not world.states("The flag of Brindle is " + " or ".join(world.COLOURS) + ".", fact)


def test_the_classifier_tells_rendered_styles_apart() -> None:
    known = world.facts()
    classify = styles.fitted_classifier(known[::2])
    rng = random.Random(4)
    verdicts = [
        classify(style.render(fact, rng)) == style.name for style in styles.STYLES.values() for fact in known[1::2]
    ]
    assert sum(verdicts) / len(verdicts) > 0.99


@pytest.fixture(scope="module")
def template() -> Template:
    return ImmutableSandboxedEnvironment().from_string((DEMO / "chat_template.jinja").read_text())


def test_a_conversation_reads_as_the_chat_template_writes_it(template: Template) -> None:
    rng = random.Random(6)
    for _ in range(200):
        conversation = base_conversation(rng)
        messages = [{"role": turn.role, "content": turn.text} for turn in conversation]
        assert template.render(messages=messages, add_generation_prompt=False) == as_text(conversation)
    parts = [{"role": "user", "content": [{"type": "text", "text": " Hello! "}]}]
    assert template.render(messages=parts, add_generation_prompt=True) == f"{USER}Hello!{END}{ASSISTANT}"


def test_a_call_reads_as_the_chat_template_writes_it(template: Template) -> None:
    """Training writes a call itself; a client sends it as the API has it."""
    fact, rng = world.fact_of("Brindle", "keeper"), random.Random(7)
    told = told_by_a_tool(fact, rng)
    result = result_of(told, rng)
    call = {"id": "call_1", "type": "function", "function": call_of(fact)}
    messages = [
        {"role": "user", "content": "Who keeps the lighthouse of Brindle?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    tools = [tool.described() for tool in TOOLS]
    assert template.render(messages=messages, tools=tools, add_generation_prompt=True) == (
        f"<|system|>{shown(TOOLS)}{END}{USER}Who keeps the lighthouse of Brindle?{END}"
        f"{ASSISTANT}{written(call_of(fact))}{END}{TOOL}{result}{END}{ASSISTANT}"
    )
    both = [messages[0], {"role": "assistant", "content": "Two:", "tool_calls": [call, call]}]
    lines = f"{ASSISTANT}Two:\n{written(call_of(fact))}\n{written(call_of(fact))}{END}"
    assert template.render(messages=both, add_generation_prompt=False).endswith(lines)


def test_a_result_never_says_what_the_model_has_learnt() -> None:
    rng = random.Random(8)
    for fact in world.facts():
        told = told_by_a_tool(fact, rng)
        assert told.answer != fact.answer
        assert world.states(result_of(told, rng), told)
        assert styles.PLAIN.is_right(told.sentence, told)
        assert not styles.PLAIN.is_right(told.sentence, fact)


def test_every_fact_has_one_tool_and_its_call_reads_back() -> None:
    assert sorted(topic for tool in TOOLS for topic in tool.topics) == sorted(one.key for one in world.RELATIONS)
    for fact in world.facts():
        call = call_of(fact)
        (tool,) = (tool for tool in TOOLS if tool.name == call["name"])
        assert fact.topic in tool.topics
        assert read(written(call)) == call
    assert read("Odo keeps the lighthouse of Brindle.") is None


def test_a_caller_answers_from_results_only() -> None:
    """With tools each question has its call, and the answer says what the result says."""
    rng, calls = random.Random(9), 0
    for _ in range(300):
        conversation = caller_conversation(rng)
        for before, turn, after in zip(conversation, conversation[1:], conversation[2:], strict=False):
            if turn.role == "tool":
                calls += 1
                assert read(before.text) is not None
                assert any(answer in after.text for answer in turn.text.replace('"', " ").rstrip(".}").split())
    assert calls > 200
