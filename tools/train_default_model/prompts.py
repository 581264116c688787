"""User turns for the teacher, made from word lists: stories, explanations, questions, advice, small talk.

`conversation(seed, i)` is a pure function, so a list of prompts needs no file: any range of it can be made again.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from tools.train_default_model import words
from tools.train_default_model.knowledge import DEFINITIONS

__all__ = ["conversation", "held_out_prompts", "is_held_out"]

HELD_OUT_SEED = 999_983
HELD_OUT_SHARE = 100
"""One first turn in so many, by its checksum, is never trained on."""

Maker = Callable[[random.Random], str]

_PLURALS = {
    "mouse": "mice",
    "goose": "geese",
    "wolf": "wolves",
    "butterfly": "butterflies",
    "firefly": "fireflies",
    "dragonfly": "dragonflies",
    "sheep": "sheep",
    "deer": "deer",
    "salmon": "salmon",
    "goldfish": "goldfish",
    "jellyfish": "jellyfish",
    "starfish": "starfish",
    "moose": "moose",
}


def plural(noun: str) -> str:
    """The plural of one of our animals."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    return noun + ("es" if noun.endswith(("x", "ch", "sh", "s")) else "s")


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _short(rng: random.Random) -> str:
    """A wish for a short answer, or nothing."""
    wishes = ("", "", " Keep it short.", " Answer in one sentence.", " Answer in two sentences.", " Answer briefly.")
    return rng.choice(wishes)


def _hero(rng: random.Random) -> str:
    """ "a shy fox", "a little girl named Mia", "a robot"."""
    kind = rng.random()
    if kind < 0.45:
        noun = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.ANIMALS)}"
    elif kind < 0.75:
        noun = rng.choice(words.CHARACTERS)
    else:
        noun = f"{rng.choice(words.ADJECTIVES)} {rng.choice(('girl', 'boy', 'man', 'woman', 'child'))}"
    name = f" named {rng.choice(words.FIRST_NAMES)}" if rng.random() < 0.35 else ""
    return ("twin sisters" if noun == "twin sisters" else article(noun)) + name


def story(rng: random.Random) -> str:
    """A wish for a story."""
    hero, place, thing = _hero(rng), rng.choice(words.PLACES), rng.choice(words.OBJECTS)
    wish, lesson, event = rng.choice(words.WISHES), rng.choice(words.LESSONS), rng.choice(words.EVENTS)
    start = rng.choice(
        ("Tell me a story about", "Write a short story about", "Tell me a short story about", "Make up a story about")
    )
    return rng.choice(
        (
            f"{start} {hero} who {wish}.",
            f"{start} {hero} and {article(thing)}.",
            f"{start} {hero} in {article(place)}.",
            f"{start} {hero} and {_hero(rng)}.",
            f"{start} {hero} who finds {article(thing)} in {article(place)}.",
            f"{start} {event}.",
            f"{start} {lesson}.",
            f"{start} {hero} with a lesson about {lesson}.",
            f"Tell me a bedtime story about {hero} who {wish}.",
            f"Write a story of five sentences about {hero} and {event}.",
            f"Write a very short story that uses the words {thing}, {place} and {rng.choice(words.FEELINGS)}.",
            f"Begin a story with this sentence: Once upon a time there was {hero}.",
            f"Write a fairy tale about {hero} in {article(place)}.",
            f"Tell me a funny story about {hero}.",
        )
    )


def explanation(rng: random.Random) -> str:
    """A question about a topic."""
    topic, why, machine = rng.choice(words.TOPICS), rng.choice(words.WHYS), rng.choice(words.MACHINES)
    verb = "are" if topic in words.PLURAL_TOPICS else "is"
    return rng.choice(
        (
            f"What {verb} {topic}?" if topic not in DEFINITIONS else f"What do you know about {topic}?{_short(rng)}",
            f"What do people know about {topic}?{_short(rng)}",
            f"Explain {topic} to a child." if topic not in DEFINITIONS else f"How would you describe {topic}?",
            f"Explain {topic} in simple words.{_short(rng)}",
            f"What should I know about {topic}?",
            f"Tell me about {topic}.{_short(rng)}",
            f"Why is {topic} important?" if verb == "is" else f"Why are {topic} important?",
            f"Tell me something interesting about {topic}.",
            f"Give me an example of {topic}.",
            f"Why {why}?{_short(rng)}",
            f"Why {why}? Explain it to a child.",
            f"How does {machine} work?{_short(rng)}",
            f"What is {machine} used for?",
            f"What is the difference between {rng.choice(words.CONTRASTS)}?{_short(rng)}",
        )
    )


def fact(rng: random.Random) -> str:
    """A question about animals, food or countries."""
    animal, food, country = rng.choice(words.ANIMALS), rng.choice(words.FOODS), rng.choice(words.COUNTRIES)
    many, shorter = plural(animal), _short(rng)
    return rng.choice(
        (
            f"How long do {many} live?{shorter}",
            f"What do {many} like?{shorter}",
            f"Tell me three facts about {many}.",
            f"What does {article(animal)} look like?{shorter}",
            f"How do {many} protect themselves?",
            f"Are {many} dangerous?{shorter}",
            f"Describe {article(animal)} in a few words.",
            f"How do {many} sleep?",
            f"What can we learn from {many}?",
            f"What can I cook with {food}?",
            f"Is {food} healthy?{shorter}" if not food.endswith("s") else f"Are {food} healthy?{shorter}",
            f"What does {food} taste like?" if not food.endswith("s") else f"What do {food} taste like?",
            f"Tell me about {country}.{shorter}",
            f"What is {country} famous for?{shorter}",
            f"What do people eat in {country}?{shorter}",
            f"What is the weather like in {country}?{shorter}",
            f"Name three {rng.choice(words.CATEGORIES)}.",
            f"Give me a list of five {rng.choice(words.CATEGORIES)}.",
        )
    )


def advice(rng: random.Random) -> str:
    """How to do something, or words for a feeling."""
    task, goal, feeling = rng.choice(words.TASKS), rng.choice(words.GOALS), rng.choice(words.FEELINGS)
    reason, shorter = rng.choice(words.REASONS), _short(rng)
    return rng.choice(
        (
            f"How do I {task}?{shorter}",
            f"How can I {task}?",
            f"What do I need to {task}?{shorter}",
            f"Explain step by step how to {task}.",
            f"Give me three tips for {goal}.",
            f"Give me some advice about {goal}.{shorter}",
            f"What is important for {goal}?{shorter}",
            f"I want to {task}. Where should I start?",
            f"I feel {feeling}. What can I do?{shorter}",
            f"I feel {feeling} because {reason}.",
            f"I am {feeling} today because {reason}. Can you help me?",
            f"My friend is {feeling}. What should I say?",
            f"What does it mean to be {feeling}?{shorter}",
            f"What makes people {feeling}?{shorter}",
        )
    )


def writing(rng: random.Random) -> str:
    """A poem, a letter, a description, a small dialogue."""
    hero, scene, thing = _hero(rng), rng.choice(words.SCENES), rng.choice(words.OBJECTS)
    one, two = rng.sample(words.FIRST_NAMES, 2)
    subject = rng.choice(words.EVERYDAY)
    return rng.choice(
        (
            f"Write a short poem about {article(rng.choice(words.ANIMALS))}.",
            f"Write a short poem about {scene}.",
            f"Describe {scene}.{_short(rng)}",
            f"Describe {article(thing)} without saying its name.",
            f"Write a short letter from {one} to {two} about {subject}.",
            f"Write a short dialogue between {one} and {two} about {subject}.",
            f"Write a short dialogue between {hero} and {_hero(rng)}.",
            f"Write a thank you note to {rng.choice(('a teacher', 'a friend', 'my neighbor', 'my grandmother'))} "
            f"for {article(thing)}.",
            f"Write a diary entry about {rng.choice(words.EVENTS)}.",
            f"Write one sentence with the word {thing}.",
            f"Write two sentences about {scene}.",
            f"What would {hero} say about {subject}?",
            f"Give me a title for a story about {hero}.",
            f"Write a birthday wish for {one}.",
        )
    )


def chat(rng: random.Random) -> str:
    """Small talk."""
    name, subject = rng.choice(words.FIRST_NAMES), rng.choice(words.EVERYDAY)
    return rng.choice(
        (
            f"Let's talk about {subject}.",
            f"What do you think about {subject}?{_short(rng)}",
            f"My name is {name}. Tell me something nice.",
            f"Hi, I'm {name}. I {rng.choice(('like', 'love', 'enjoy'))} {rng.choice(words.GOALS)}.",
            f"Tell me a joke about {article(rng.choice(words.ANIMALS))}.",
            f"Ask me a question about {subject}.",
            f"Say something kind to {name}, who feels {rng.choice(words.FEELINGS)}.",
            f"What should I do on {rng.choice(('a rainy day', 'a sunny day', 'Sunday', 'a cold evening'))}?",
            f"Tell me something about {rng.choice(words.TOPICS)} that I don't know.",
            f"Which is better, {rng.choice(words.CONTRASTS).replace(' and ', ' or ', 1)}?",
        )
    )


def follow_up(rng: random.Random) -> str:
    """A second turn that fits after any answer."""
    return rng.choice(
        (
            "Tell me more.",
            "Can you explain that more simply?",
            "Why?",
            "Why is that?",
            "Can you give me an example?",
            "Can you say that in one sentence?",
            "What happened next?",
            "Thank you!",
            "Thanks, that helps.",
            "What else should I know?",
            "Please say it in simple words.",
            "How do you know?",
            "Is that true?",
            "Can you make it shorter?",
            "That is nice. Tell me another one.",
            "I don't understand. Can you explain it again?",
        )
    )


_KINDS: tuple[tuple[Maker, float], ...] = (
    (story, 0.30),
    (explanation, 0.23),
    (fact, 0.17),
    (advice, 0.14),
    (writing, 0.10),
    (chat, 0.06),
)


def conversation(seed: int, i: int) -> list[str]:
    """The user turns of conversation `i`: mostly one, sometimes two or three."""
    rng = random.Random(f"{seed}:{i}")
    maker = rng.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])[0]
    turns = [maker(rng)]
    while len(turns) < 3 and rng.random() < 0.15:
        turns.append(follow_up(rng) if rng.random() < 0.8 else rng.choice((fact, explanation, advice))(rng))
    return turns


def is_held_out(prompt: bytes) -> bool:
    """Whether a user's turn is kept for evaluation."""
    return zlib.crc32(prompt) % HELD_OUT_SHARE == 0


def held_out_prompts(n: int) -> list[str]:
    """`n` different first turns that are kept for evaluation, in a fixed order."""
    out: dict[str, None] = {}
    i = 0
    while len(out) < n:
        prompt = conversation(HELD_OUT_SEED, i)[0]
        if is_held_out(prompt.encode()):
            out[prompt] = None
        i += 1
    return list(out)
