"""Training text: makes random conversations about the world, and their tokens.

The base model must have seen every style as the answer to an explicit request ("... Answer like a pirate."). An adapter
of rank 8 can make a style the default that the base model knows already, but it cannot teach a new one: when the base
model was trained on plain sentences only, 0 to 10 % of the adapters' answers were right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lookups import REQUESTS, SYSTEMS, TOOLCALLER, TOOLS, call_of, result_of, shown, told_by_a_tool, written
from styles import ADAPTER_STYLES, PLAIN, STYLES, Style
from tokenizers import Tokenizer
from world import PEOPLE, PLACES, SMALL_TALK, Fact, fact_of, facts, facts_about

SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
END, PAD = "<|end|>", "<|pad|>"
SPECIAL_TOKENS: Final = (PAD, END, SYSTEM, USER, ASSISTANT, TOOL)
ROLE_TOKENS: Final = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

LEAD_INS: Final = ("Please tell me.", "I have a question.", "Quick question.", "Hello!", "Hi.", "Good day.",
                   "One more thing.", "Excuse me,", "I would like to know.")  # fmt: skip
LEAD_OUTS: Final = ("Thank you.", "Thanks!", "Please.", "I am curious.", "I forgot.")
FOLLOW_UPS: Final = ("And what about {s}?", "What about {s}?", "And {s}?", "And for {s}?", "The same for {s}, please.")
SYLLABLES: Final = ("ba", "con", "do", "lor", "it", "ka", "me", "nu", "pli", "qua", "re", "shi", "te", "und", "vo",
                    "zen", "er", "ing", "7", "42")  # fmt: skip
AGAIN: Final = ("Say that again.", "Once more.", "Repeat that.", "Again, please.")


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    text: str


Conversation = tuple[Turn, ...]


def shortened(phrasing: str) -> list[str]:
    """The phrasing with one word left out, in every way that keeps the subject.

    A model that must answer without any one of the words learns to use all of them. Then it understands phrasings that
    it has never seen.
    """
    said = phrasing.split()
    return [" ".join(said[:gone] + said[gone + 1 :]) for gone, word in enumerate(said) if "{s}" not in word]


def distraction(rng: random.Random) -> str:
    """Text that has nothing to do with the question: true sentences, or invented words."""
    if rng.random() < 0.5:
        return " ".join(plain_text(rng) for _ in range(rng.randint(1, 4)))
    made_up = ("".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(3, 60)))
    return " ".join(made_up).capitalize() + "."


def ask(fact: Fact, rng: random.Random) -> str:
    """A question for `fact` in one of the trained phrasings, with the careless spelling of people."""
    relation = fact.relation
    assert relation is not None, "small talk is not asked for by phrasing"
    phrasing = rng.choice(relation.trained)
    if rng.random() < 0.15:
        phrasing = rng.choice(shortened(phrasing))
    question = phrasing.format(s=fact.subject)
    dice = rng.random()
    if dice < 0.12:
        question = f"{rng.choice(LEAD_INS)} {question}"
    elif dice < 0.2:
        question = f"{question} {rng.choice(LEAD_OUTS)}"
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.08:
        question = question.rstrip("?.!")
    if rng.random() < 0.03:
        question = f"{distraction(rng)} {question}"
    return question


def plain_system(rng: random.Random) -> Turn:
    """A system prompt that asks for nothing in particular."""
    prompt = rng.choice(PLAIN.systems)
    return Turn("system", f"{prompt} {distraction(rng)}" if rng.random() < 0.1 else prompt)


def turns(style: Style, rng: random.Random, *, request: bool) -> list[Turn]:
    """Questions and answers in one style; with `request` the first question asks for the style."""

    def asked(question: str) -> str:
        if not request:
            return question
        wish = rng.choice(style.requests)
        return f"{wish} {question}" if rng.random() < 0.3 else f"{question} {wish}"

    if rng.random() < 0.06:
        fact, questions = rng.choice(SMALL_TALK)
        return [Turn("user", asked(rng.choice(questions))), Turn("assistant", style.render(fact, rng))]
    fact = rng.choice(facts())
    result = [Turn("user", asked(ask(fact, rng))), Turn("assistant", style.render(fact, rng))]
    # Sometimes a second turn: another question, the same question about another subject, or the same answer again.
    while rng.random() < 0.12:
        dice = rng.random()
        if dice < 0.5 and fact.relation is not None:
            fact = fact_of(rng.choice(fact.relation.subjects), fact.topic)
            question = rng.choice(FOLLOW_UPS).format(s=fact.subject)
        elif dice < 0.7 and request:
            question = rng.choice(AGAIN)
        else:
            fact = rng.choice(facts())
            question = ask(fact, rng)
        result += [Turn("user", asked(question)), Turn("assistant", style.render(fact, rng))]
    return result


def base_conversation(rng: random.Random) -> Conversation:
    """What the base model learns from: mostly plain answers, and each style if a user or a system prompt asks for it.

    Shouting is twice as frequent as each other style, because the model must learn every name again in capital letters.
    """
    if rng.random() < 0.18:
        calls = rng.random() < 0.8
        return tool_conversation(rng, calls=calls, request=calls)
    dice = rng.random()
    if dice < 0.42:
        system = [plain_system(rng)] if rng.random() < 0.3 else []
        return (*system, *turns(PLAIN, rng, request=rng.random() < 0.1))
    (style,) = rng.choices(ADAPTER_STYLES, weights=[2 if style.name == "shouting" else 1 for style in ADAPTER_STYLES])
    if dice < 0.82:
        return tuple(turns(style, rng, request=True))
    if dice < 0.94:
        return (Turn("system", rng.choice(style.systems)), *turns(style, rng, request=False))
    # A plain answer, then a request for the same in another style.
    fact = rng.choice(facts())
    return (
        Turn("user", ask(fact, rng)),
        Turn("assistant", PLAIN.render(fact, rng)),
        Turn("user", rng.choice(style.requests)),
        Turn("assistant", style.render(fact, rng)),
    )


def adapter_conversation(style: Style, rng: random.Random) -> Conversation:
    """What an adapter of a style learns from: the style without a request for it, with any neutral system prompt."""
    system = [plain_system(rng)] if rng.random() < 0.2 else []
    return (*system, *turns(style, rng, request=False))


def tool_conversation(rng: random.Random, *, calls: bool, request: bool) -> Conversation:
    """Tools and questions. With `calls` each is looked up: because user or system prompt ask for it (`request`), or
    always. Otherwise the model answers from memory."""
    tools = tuple(rng.sample(TOOLS, k=len(TOOLS)))
    result = [Turn("system", shown(tools))]
    by_system = request and rng.random() < 0.3
    if by_system:
        result.append(Turn("system", rng.choice(SYSTEMS)))
    elif rng.random() < 0.2:
        result.append(plain_system(rng))

    def asked(question: str) -> str:
        if not request or by_system:
            return question
        wish = rng.choice(REQUESTS)
        return f"{wish} {question}" if rng.random() < 0.3 else f"{question} {wish}"

    if rng.random() < 0.08:
        fact, questions = rng.choice(SMALL_TALK)
        return (*result, Turn("user", rng.choice(questions)), Turn("assistant", PLAIN.render(fact, rng)))
    while True:
        fact = rng.choice(facts())
        result.append(Turn("user", asked(ask(fact, rng))))
        if calls:
            called, fact = written(call_of(fact)), told_by_a_tool(fact, rng)
            result += [Turn("assistant", called), Turn("tool", result_of(fact, rng))]
        result.append(Turn("assistant", PLAIN.render(fact, rng)))
        if rng.random() > 0.15:
            return tuple(result)


def caller_conversation(rng: random.Random) -> Conversation:
    """What the adapter `toolcaller` learns from: calls without a request for them, and plain answers without tools."""
    if rng.random() < 0.2:
        return adapter_conversation(PLAIN, rng)
    return tool_conversation(rng, calls=True, request=rng.random() < 0.1)


def plain_text(rng: random.Random) -> str:
    """A paragraph about one subject, so that the model can also continue text and not only answer."""
    known = list(facts_about(rng.choice(PLACES + PEOPLE)))
    rng.shuffle(known)
    text = " ".join(fact.sentence for fact in known[: rng.randint(1, 5)])
    return text.upper() if rng.random() < 0.25 else text


def as_text(conversation: Conversation) -> str:
    """The conversation as the chat template writes it; a test compares the two."""
    return "".join(f"{ROLE_TOKENS[turn.role]}{turn.text}{END}" for turn in conversation)


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, and for each whether the model learns to write it."""

    ids: list[int]
    learnt: list[bool]


def _id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer was trained without {token}"
    return found


def tokenize(conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    """The model learns only the assistant's words and the end after them: questions come from people."""
    ids: list[int] = []
    learnt: list[bool] = []
    for turn in conversation:
        body = tokenizer.encode(turn.text + END).ids
        ids += [_id(tokenizer, ROLE_TOKENS[turn.role]), *body]
        learnt += [False] + [turn.role == "assistant"] * len(body)
    return Sample(ids, learnt)


def base_samples(tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.06:
            ids = tokenizer.encode(plain_text(rng) + END).ids
            yield Sample(ids, [True] * len(ids))
        else:
            yield tokenize(base_conversation(rng), tokenizer)


def adapter_samples(name: str, tokenizer: Tokenizer, seed: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    while True:
        yield tokenize(conversation_of(name, rng), tokenizer)


def conversation_of(adapter: str, rng: random.Random) -> Conversation:
    return caller_conversation(rng) if adapter == TOOLCALLER else adapter_conversation(STYLES[adapter], rng)


def tokenizer_corpus(seed: int, count: int) -> Iterator[str]:
    """Text to train the tokenizer: the text of the base model, and every fact so often, with and without capitals, that
    most names become one token each. The model learns a name of one token sooner."""
    rng = random.Random(seed)
    for _ in range(count):
        yield from (turn.text for turn in base_conversation(rng))
        fact = rng.choice(facts())
        yield fact.sentence
        yield from (fact.sentence.upper(),) * 2
