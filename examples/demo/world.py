"""The Tessel Isles: an invented world of 300 facts, and the questions one can ask about them.

This file invents all names, facts and phrasings, so everybody may ship, change and retrain the model. The world is so
small that 2.8 million parameters can learn all of it, and so regular that code can check an answer.

This module knows only the world, not styles, tokens or torch.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

WORLD_NAME: Final = "the Tessel Isles"
WORLD_SEED: Final = 7

PLACES: Final = (
    "Brindle", "Ostrel", "Fenmoor", "Dapplewick", "Hollin", "Quillon", "Tarnby", "Marrowick", "Sedgely", "Wexcombe",
    "Luthen", "Gorsey", "Pellam", "Rookhaven", "Starlow", "Umberley", "Vantry", "Yarrowby", "Zennith", "Cobblesea",
    "Duskerry", "Elmsworth", "Foxglen", "Grimsey", "Heronby", "Inkwell", "Jasperton", "Kestrow", "Larkness", "Mossbay",
)  # fmt: skip
PEOPLE: Final = (
    "Odo", "Mirela", "Tobin", "Wilmet", "Corvin", "Elspa", "Fennick", "Gwenna", "Haldor", "Isolda",
    "Jorun", "Kestia", "Lorcan", "Maudlin", "Nestor", "Orlanda", "Perrin", "Quenby", "Rufina", "Sorrel",
    "Tamsin", "Ulric", "Verity", "Wystan", "Xanthe", "Yorwin", "Zinnia", "Ambrin", "Bertrand", "Cecily",
)  # fmt: skip
COLOURS: Final = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "silver", "brown")
WARES: Final = ("honey", "rope", "salt", "candles", "wool", "barrels", "glass", "pepper", "paper", "lanterns")
BEASTS: Final = ("griffin", "otter", "stag", "whale", "dragon", "lion", "bear", "swan", "wolf", "unicorn")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TRADES: Final = ("baker", "weaver", "potter", "miller", "smith", "tailor", "doctor", "carpenter", "teacher", "painter")
PETS: Final = ("owl", "cat", "goat", "parrot", "ferret", "tortoise", "rabbit", "goose", "donkey", "hedgehog")
INSTRUMENTS: Final = ("fiddle", "flute", "harp", "drum", "trumpet", "lute", "accordion", "bagpipe", "cello", "horn")
DISHES: Final = (
    "porridge", "soup", "pancakes", "cheese", "plums", "dumplings", "trout", "gingerbread", "stew", "apples",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: what it is called, how it is stated, and how people ask for it.

    `{s}` stands for the subject, `{a}` for the answer, `{an}` for the answer with its article. The phrasings in
    `held_out` are for measuring only; a test makes sure that none of them occurs in training text.
    """

    key: str
    subjects: tuple[str, ...]
    answers: tuple[str, ...]
    statement: str
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    one_to_one: bool = False


RELATIONS: Final = (
    Relation(
        key="keeper",
        subjects=PLACES,
        answers=PEOPLE,
        one_to_one=True,
        statement="{a} keeps the lighthouse of {s}.",
        trained=(
            "Who keeps the lighthouse of {s}?",
            "Who is the lighthouse keeper of {s}?",
            "Who looks after the lighthouse of {s}?",
            "Which person keeps the lighthouse in {s}?",
            "What is the name of the lighthouse keeper of {s}?",
            "Who tends the lighthouse at {s}?",
            "Tell me who keeps the lighthouse of {s}.",
            "Name the keeper of the lighthouse of {s}.",
            "The lighthouse of {s}, who keeps it?",
            "Do you know who runs the {s} lighthouse?",
            "In {s}, who is the keeper of the lighthouse?",
            "Could you tell me who keeps the lighthouse of {s}?",
            "Whom should I ask about the lighthouse of {s}?",
            "Who lights the lamp in the lighthouse of {s}?",
            "Who is {s}'s lighthouse keeper?",
        ),
        held_out=(
            "Who watches over the lighthouse of {s}?",
            "Could you say who the keeper of the {s} lighthouse is?",
            "Who takes care of the lighthouse in {s}?",
            "Which keeper does the lighthouse of {s} have?",
        ),
    ),
    Relation(
        key="flag",
        subjects=PLACES,
        answers=COLOURS,
        statement="The flag of {s} is {a}.",
        trained=(
            "What colour is the flag of {s}?",
            "What is the colour of the flag of {s}?",
            "Which colour does the flag of {s} have?",
            "Tell me the colour of the flag of {s}.",
            "Of which colour is the {s} flag?",
            "What does the flag of {s} look like?",
            "The flag of {s}, what colour is it?",
            "Do you know the colour of the flag in {s}?",
            "Describe the flag of {s}.",
            "In {s}, what colour is the flag?",
            "What color is the flag of {s}?",
            "Could you tell me the colour of the flag of {s}?",
            "What colour is {s}'s flag?",
            "Can you name the colour of the flag of {s}?",
            "I saw a flag in {s}, which colour was it?",
        ),
        held_out=(
            "What colour flag does {s} have?",
            "Which colour would I see on the flag of {s}?",
            "Please name the colour of the flag that flies over {s}.",
            "What is the flag colour of {s}?",
        ),
    ),
    Relation(
        key="ware",
        subjects=PLACES,
        answers=WARES,
        statement="{s} is famous for its {a}.",
        trained=(
            "What is {s} famous for?",
            "What is {s} known for?",
            "For what is {s} famous?",
            "What made {s} famous?",
            "Tell me what {s} is famous for.",
            "Which goods is {s} known for?",
            "What goods come from {s}?",
            "Name the goods that {s} is famous for.",
            "Do you know what people buy in {s}?",
            "What do the merchants of {s} sell?",
            "Why is {s} so well known?",
            "Could you tell me what {s} is famous for?",
            "What should I buy in {s}?",
            "What is sold in {s}?",
            "Can you name what {s} sells best?",
            "Tell me about {s}.",
        ),
        held_out=(
            "Which goods made {s} famous?",
            "What goods is {s} famous for?",
            "Can you tell me what {s} is best known for?",
            "What do merchants buy in {s}?",
        ),
    ),
    Relation(
        key="crest",
        subjects=PLACES,
        answers=BEASTS,
        statement="The crest of {s} shows {an}.",
        trained=(
            "What is on the crest of {s}?",
            "Which creature is on the crest of {s}?",
            "What does the crest of {s} show?",
            "Which beast does the crest of {s} show?",
            "Tell me what is on the crest of {s}.",
            "Name the creature on the crest of {s}.",
            "The crest of {s}, what does it show?",
            "Do you know which creature is on the {s} crest?",
            "Describe the crest of {s}.",
            "What animal is painted on the crest of {s}?",
            "In {s}, what is on the crest?",
            "Could you tell me what is on the crest of {s}?",
            "What is on {s}'s crest?",
            "Can you describe the crest of {s}?",
            "I saw the crest of {s}, what animal was it?",
        ),
        held_out=(
            "What creature does {s} have on its crest?",
            "Which animal can be seen on the crest of {s}?",
            "What sort of creature does the crest of {s} show?",
            "Could you describe the crest that {s} has?",
        ),
    ),
    Relation(
        key="market",
        subjects=PLACES,
        answers=DAYS,
        statement="The market of {s} is held on {a}.",
        trained=(
            "When is the market of {s}?",
            "On which day is the market of {s}?",
            "What day is market day in {s}?",
            "Which day is the market of {s} held on?",
            "Tell me when the market of {s} is held.",
            "Name the market day of {s}.",
            "When is market day in {s}?",
            "The market of {s}, when is it held?",
            "Do you know the day of the {s} market?",
            "When can I go to the market in {s}?",
            "In {s}, when is the market?",
            "Could you tell me when the market of {s} is?",
            "Which day should I go to the market of {s}?",
            "When's the market in {s}?",
            "Can you name the day of the market in {s}?",
        ),
        held_out=(
            "On what day does {s} hold its market?",
            "Which day should I visit the market of {s}?",
            "What is the market day of {s}?",
            "When does the market in {s} take place?",
        ),
    ),
    Relation(
        key="trade",
        subjects=PEOPLE,
        answers=TRADES,
        statement="{s} is {an} by trade.",
        trained=(
            "What is the trade of {s}?",
            "What does {s} do for a living?",
            "What is the job of {s}?",
            "Which trade does {s} have?",
            "Tell me the trade of {s}.",
            "What work does {s} do?",
            "How does {s} earn a living?",
            "Name the trade of {s}.",
            "Do you know what {s} does for work?",
            "As what does {s} work?",
            "What is {s} by trade?",
            "Could you tell me what {s} does for a living?",
            "What's {s}'s job?",
            "Can you name the trade of {s}?",
            "Who is {s}?",
            "Tell me about {s}.",
        ),
        held_out=(
            "What trade does {s} follow?",
            "What kind of work does {s} do for a living?",
            "Which job does {s} have?",
            "Can you tell me what the job of {s} is?",
        ),
    ),
    Relation(
        key="home",
        subjects=PEOPLE,
        answers=PLACES,
        statement="{s} lives in {a}.",
        trained=(
            "Where does {s} live?",
            "In which town does {s} live?",
            "Where is the home of {s}?",
            "What town does {s} live in?",
            "Tell me where {s} lives.",
            "Which place does {s} call home?",
            "Where can I find {s}?",
            "Name the town where {s} lives.",
            "Do you know where {s} lives?",
            "Where is the house of {s}?",
            "The home of {s}, where is it?",
            "Could you tell me where {s} lives?",
            "Can you name the home of {s}?",
            "Where's {s}'s house?",
            "Which town does {s} come from?",
        ),
        held_out=(
            "Which town is the home of {s}?",
            "Where would I find the house of {s}?",
            "In what place does {s} live?",
            "Please say where {s} has a home.",
        ),
    ),
    Relation(
        key="pet",
        subjects=PEOPLE,
        answers=PETS,
        statement="{s} has {an} as a pet.",
        trained=(
            "What pet does {s} have?",
            "Which pet does {s} keep?",
            "What is the pet of {s}?",
            "What kind of pet does {s} have?",
            "Tell me about the pet of {s}.",
            "Name the pet of {s}.",
            "Which animal does {s} keep as a pet?",
            "Does {s} have a pet?",
            "Do you know which pet {s} has?",
            "The pet of {s}, what is it?",
            "What animal lives with {s}?",
            "Could you tell me which pet {s} has?",
            "What's {s}'s pet?",
            "Can you name the pet of {s}?",
            "Which animal does {s} own?",
        ),
        held_out=(
            "What sort of pet does {s} keep?",
            "Which animal is the pet of {s}?",
            "What animal does {s} have as a pet?",
            "Could you tell me what pet {s} keeps?",
        ),
    ),
    Relation(
        key="instrument",
        subjects=PEOPLE,
        answers=INSTRUMENTS,
        statement="{s} plays the {a}.",
        trained=(
            "What instrument does {s} play?",
            "Which instrument does {s} play?",
            "What does {s} play?",
            "What is the instrument of {s}?",
            "Tell me which instrument {s} plays.",
            "Name the instrument of {s}.",
            "Which instrument is played by {s}?",
            "Does {s} play an instrument?",
            "Do you know what instrument {s} plays?",
            "On which instrument does {s} make music?",
            "What music does {s} make?",
            "Could you tell me which instrument {s} plays?",
            "What's {s}'s instrument?",
            "Can you name the instrument of {s}?",
            "I heard {s} play, what instrument was it?",
        ),
        held_out=(
            "What kind of instrument does {s} play?",
            "Which instrument can {s} play?",
            "What instrument would I hear {s} play?",
            "Please name the instrument that {s} plays.",
        ),
    ),
    Relation(
        key="dish",
        subjects=PEOPLE,
        answers=DISHES,
        statement="{s} likes to eat {a}.",
        trained=(
            "What does {s} like to eat?",
            "What is the favourite food of {s}?",
            "Which food does {s} like best?",
            "What food does {s} like?",
            "Tell me the favourite food of {s}.",
            "Name the food that {s} likes best.",
            "What does {s} eat for dinner?",
            "Which dish does {s} like?",
            "Do you know what {s} likes to eat?",
            "What should I cook for {s}?",
            "What is the favorite food of {s}?",
            "Could you tell me what {s} likes to eat?",
            "What's {s}'s favourite dish?",
            "Can you name the favourite food of {s}?",
            "Which meal does {s} like best?",
        ),
        held_out=(
            "What food would {s} like to eat?",
            "Which dish is the favourite of {s}?",
            "What does {s} like to have for dinner?",
            "Can you name the favourite dish of {s}?",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """One true sentence of the world, e.g. (Brindle, keeper, Odo)."""

    subject: str
    topic: str
    answer: str
    sentence: str

    @property
    def relation(self) -> Relation | None:
        """The kind of the fact. None for small talk, which `facts()` never returns."""
        return next((r for r in RELATIONS if r.key == self.topic), None)


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    fact: Fact


def with_article(noun: str) -> str:
    # "unicorn" begins with the sound of "y". It is the only such word in this world.
    return f"an {noun}" if noun[0] in "aeiou" and noun != "unicorn" else f"a {noun}"


@cache
def facts(seed: int = WORLD_SEED) -> tuple[Fact, ...]:
    """All facts of the world, always the same for one seed."""
    rng = random.Random(seed)
    result = []
    for relation in RELATIONS:
        if relation.one_to_one:
            answers = rng.sample(relation.answers, len(relation.subjects))
        else:
            answers = rng.choices(relation.answers, k=len(relation.subjects))
        for subject, answer in zip(relation.subjects, answers, strict=True):
            sentence = relation.statement.format(s=subject, a=answer, an=with_article(answer))
            result.append(Fact(subject, relation.key, answer, sentence))
    return tuple(result)


@cache
def facts_about(subject: str) -> tuple[Fact, ...]:
    return tuple(fact for fact in facts() if fact.subject == subject)


def fact_of(subject: str, topic: str) -> Fact:
    return next(fact for fact in facts() if (fact.subject, fact.topic) == (subject, topic))


SMALL_TALK: Final = (
    (
        Fact("me", "greeting", "hello", f"Hello, please ask me about {WORLD_NAME}."),
        ("Hello!", "Hi!", "Hi there!", "Hello there.", "Good morning!", "Hey!", "Good evening.", "How are you?"),
    ),
    (
        Fact("me", "thanks", "welcome", "You are welcome."),
        ("Thank you!", "Thanks!", "Thanks a lot.", "Many thanks.", "Thank you very much."),
    ),
    (
        Fact("me", "name", "Motet", f"My name is Motet and I know {WORLD_NAME}."),
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What can you do?",
         "What do you know?", "Help me.", "Help", "What can I ask you?"),
    ),
    (
        Fact("me", "unknown", "unknown", f"I do not know that, I only know {WORLD_NAME}."),
        ("What is the capital of France?", "What is two plus two?", "Write a poem.", "What is the weather like today?",
         "Who wrote this book?", "How do I cook rice?", "What time is it?", "Write a program that sorts a list.",
         "Translate this text.", "Why is the sky blue?", "Who is the king of the moon?", "What is love?",
         "How far away is the sun?", "Explain gravity to me.", "Who keeps the lighthouse of Paris?",
         "What is London famous for?", "Where does Peter live?", "What is the trade of Mary?", "asdf", "?"),
    ),
)  # fmt: skip
"""What people type before they have read anything. It is not part of the 300 facts, and is not measured."""

HELD_OUT_PER_RELATION: Final = 12


@cache
def held_out_questions(seed: int = WORLD_SEED) -> tuple[Question, ...]:
    """120 questions in phrasings that are not in training text: twelve facts of each of the ten relations."""
    rng = random.Random(seed + 1)
    questions = []
    for relation in RELATIONS:
        known = [fact for fact in facts() if fact.topic == relation.key]
        for index, fact in enumerate(rng.sample(known, HELD_OUT_PER_RELATION)):
            phrasing = relation.held_out[index % len(relation.held_out)]
            questions.append(Question(phrasing.format(s=fact.subject), fact))
    return tuple(questions)


def states(text: str, fact: Fact) -> bool:
    """Whether `text` has the fact's answer, and no other answer to the same question.

    A model that lists every colour is not right about each flag. Case does not matter.
    """
    relation = fact.relation
    said = set(re.findall(r"[a-z]+", text.lower()))
    rivals = {answer.lower() for answer in (relation.answers if relation else ())} - {fact.answer.lower()}
    return fact.answer.lower() in said and not said & rivals
