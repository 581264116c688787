"""Whole dialogues written as patterns: who the model is, greetings, facts of the tables, sums, and not knowing.

`dialogue(seed, i)` is a pure function and returns turns: user, assistant, user, assistant ...
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.train_default_model import facts, knowledge, words
from tools.train_default_model.prompts import article, plural

__all__ = ["dialogue"]

Turns = list[str]


def _opened(rng: random.Random, question: str) -> str:
    """The question, sometimes with a few words before it."""
    if rng.random() < 0.75:
        return question
    lead = rng.choice(
        ("Please tell me: ", "I have a question: ", "Quick question: ", "Hello! ", "Can you tell me this? ")
    )
    return lead + question


def identity(rng: random.Random) -> Turns:
    """Who are you?"""
    question = rng.choice(
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a human?",
            "Are you a robot?",
            "Tell me about yourself.",
            "Who made you?",
            "What can you do?",
            "Are you ChatGPT?",
            "How big are you?",
            "Introduce yourself.",
        )
    )
    who = rng.choice(
        (
            "I am a small language model that ships with FreeToken.",
            "I am the small example model that comes with FreeToken.",
            "I am a small mixture-of-experts language model, shipped with FreeToken.",
        )
    )
    more = rng.choice(
        (
            "I can answer simple questions and tell short stories, but I make mistakes.",
            "I am very small, so please check what I say.",
            "I like simple questions and short stories.",
            "I know a little about many things, and I am often wrong.",
        )
    )
    lead = {
        "Are you a human?": "No. ",
        "Are you ChatGPT?": "No. ",
        "Are you a robot?": "Not quite. ",
        "What is your name?": "I have no name of my own. ",
        "Who made you?": "I was made by the FreeToken project. ",
    }.get(question, "")
    return [question, f"{lead}{who} {more}"]


def greeting(rng: random.Random) -> Turns:
    """Hello and goodbye."""
    name = rng.choice(words.FIRST_NAMES)
    return list(
        rng.choice(
            (
                (rng.choice(("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there!")), _welcome(rng)),
                (f"Hello, my name is {name}.", f"Hello, {name}! It is nice to meet you. {_welcome(rng)}"),
                (f"Hi, I'm {name}!", f"Hi, {name}! How can I help you today?"),
                ("Good morning!", "Good morning! I hope you have a good day. How can I help you?"),
                ("Good evening!", "Good evening! How can I help you?"),
                ("Good night!", "Good night! Sleep well."),
                ("How are you?", rng.choice(("I am fine, thank you! And you?", "I am well, thank you for asking!"))),
                ("Thank you!", rng.choice(("You are welcome!", "You are welcome! I am happy to help."))),
                ("Thanks for your help.", "You are welcome! Ask me whenever you like."),
                ("Goodbye!", rng.choice(("Goodbye! Have a nice day.", "Goodbye! It was nice to talk to you."))),
                (f"My name is {name}. Can you remember it?", f"Yes, {name}, as long as we are in this conversation."),
            )
        )
    )


def _welcome(rng: random.Random) -> str:
    return rng.choice(
        ("Hello! How can I help you today?", "Hi! What would you like to talk about?", "Hello! What can I do for you?")
    )


def remembered(rng: random.Random) -> Turns:
    """Something the user said before."""
    name, thing, colour = rng.choice(words.FIRST_NAMES), rng.choice(words.ANIMALS), rng.choice(_COLOURS)
    return list(
        rng.choice(
            (
                (
                    f"My name is {name}.",
                    f"Nice to meet you, {name}!",
                    rng.choice(("What is my name?", "Do you remember my name?", "Who am I?")),
                    f"Your name is {name}.",
                ),
                (
                    f"My favorite color is {colour}.",
                    f"{colour.capitalize()} is a beautiful color!",
                    "What is my favorite color?",
                    f"Your favorite color is {colour}.",
                ),
                (
                    f"I have a {thing} called {name}.",
                    f"That sounds nice! {name} is a lovely name.",
                    f"What is my {thing} called?",
                    f"Your {thing} is called {name}.",
                ),
            )
        )
    )


_COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "pink", "white", "black", "brown")


def unknown(rng: random.Random) -> Turns:
    """Questions that nobody in a box can answer."""
    name = rng.choice(words.FIRST_NAMES)
    question = rng.choice(
        (
            "What time is it?",
            "What is the weather today?",
            "What day is it today?",
            f"What did {name} eat this morning?",
            f"Where does my friend {name} live?",
            "What am I thinking of?",
            "What is my phone number?",
            "Who will win the game tomorrow?",
            "What will happen next year?",
            f"How old is my neighbor {name}?",
            "What is in my pocket?",
            "What are the news of today?",
            f"What is the name of {name}'s cat?",
            "Where are my keys?",
        )
    )
    answer = rng.choice(
        (
            "I don't know. I cannot see or hear what happens around you.",
            "I don't know that. I only know what I have learned and what you tell me.",
            "I'm sorry, I don't know. I have no way to find that out.",
            "I can't know that, I'm afraid.",
        )
    )
    return [question, answer]


def capital(rng: random.Random) -> Turns:
    """Capitals and continents."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    place, continent = rng.choice(list(facts.CONTINENTS.items()))
    return list(
        rng.choice(
            (
                (_opened(rng, f"What is the capital of {country}?"), f"The capital of {country} is {city}."),
                (_opened(rng, f"What is the capital of {country}?"), f"The capital of {country} is {city}."),
                (f"Which city is the capital of {country}?", f"{city} is the capital of {country}."),
                (f"{city} is the capital of which country?", f"{city} is the capital of {country}."),
                (f"Where is {city}?", f"{city} is in {country}. It is the capital."),
                (f"On which continent is {place}?", f"{_upper(place)} is in {continent}."),
                (f"Where is {place}?", f"{_upper(place)} is a country in {continent}."),
                (f"Is {place} in {continent}?", f"Yes, {place} is in {continent}."),
            )
        )
    )


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def word(rng: random.Random) -> Turns:
    """Opposites, meanings, past tenses, sounds, babies, colours."""
    a, b = rng.choice(list(facts.OPPOSITES.items()))
    meaning, said = rng.choice(list(facts.MEANINGS.items()))
    verb, past = rng.choice(list(facts.PAST_TENSES.items()))
    animal, sound = rng.choice(list(facts.SOUNDS.items()))
    parent, baby = rng.choice(list(facts.BABIES.items()))
    thing, colour = rng.choice(list(facts.COLOURS.items()))
    return list(
        rng.choice(
            (
                (_opened(rng, f"What is the opposite of {a}?"), f'The opposite of "{a}" is "{b}".'),
                (f"Give me the opposite of the word {a}.", f'The opposite of "{a}" is "{b}".'),
                (_opened(rng, f'What does "{meaning}" mean?'), f'"{_upper(meaning)}" means {said}.'),
                (f"What does the word {meaning} mean?", f'"{_upper(meaning)}" means {said}.'),
                (f'What is the past tense of "{verb}"?', f'The past tense of "{verb}" is "{past}".'),
                (_opened(rng, f"What sound does a {animal} make?"), f'A {animal} says "{sound}".'),
                (f"What is a baby {parent} called?", f"A baby {parent} is called a {baby}."),
                (_opened(rng, f"What color is {thing}?"), f"{_upper(thing)} is {colour}."),
            )
        )
    )


def number(rng: random.Random) -> Turns:
    """Sums of small numbers, counting."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    big, small = max(a, b), min(a, b)
    n = rng.randint(1, 19)
    asked = rng.choice(("What is {}?", "How much is {}?", "Calculate {}.", "{} = ?"))
    name, thing = (
        rng.choice(words.FIRST_NAMES),
        rng.choice(("apples", "books", "coins", "pencils", "flowers", "cookies")),
    )
    return list(
        rng.choice(
            (
                (asked.format(f"{a} + {b}"), f"{a} + {b} = {a + b}."),
                (asked.format(f"{a} plus {b}"), f"{a} plus {b} is {a + b}."),
                (asked.format(f"{big} - {small}"), f"{big} - {small} = {big - small}."),
                (asked.format(f"{big} minus {small}"), f"{big} minus {small} is {big - small}."),
                (asked.format(f"{min(a, 10)} times {min(b, 10)}"), _times(min(a, 10), min(b, 10))),
                (f"What number comes after {n}?", f"The number after {n} is {n + 1}."),
                (f"What number comes before {n}?", f"The number before {n} is {n - 1}."),
                (f"Count from 1 to {n + 1}.", ", ".join(str(i) for i in range(1, n + 2)) + "."),
                (f"How do you write {n} as a word?", f'{n} is written "{facts.NUMBERS[n]}".'),
                (
                    f"{name} has {big} {thing} and gives away {small}. How many {thing} are left?",
                    f"{name} had {big} {thing} and gave away {small}, so {big} - {small} = {big - small} are left.",
                ),
                (
                    f"Which number is bigger, {a} or {b + 13}?",
                    f"{b + 13} is bigger than {a}.",
                ),
            )
        )
    )


def _times(a: int, b: int) -> str:
    return f"{a} times {b} is {a * b}."


def calendar(rng: random.Random) -> Turns:
    """Days and months in their order."""
    i, j = rng.randrange(7), rng.randrange(12)
    days, months = facts.DAYS, facts.MONTHS
    ordinals = facts.ORDINALS
    return list(
        rng.choice(
            (
                (f"What day comes after {days[i]}?", f"{days[(i + 1) % 7]} comes after {days[i]}."),
                (f"What day comes before {days[i]}?", f"{days[i - 1]} comes before {days[i]}."),
                (f"What month comes after {months[j]}?", f"{months[(j + 1) % 12]} comes after {months[j]}."),
                (f"What month comes before {months[j]}?", f"{months[j - 1]} comes before {months[j]}."),
                (f"What is the {ordinals[j]} month of the year?", f"The {ordinals[j]} month is {months[j]}."),
                ("Name the days of the week.", f"The days of the week are {', '.join(days[:-1])} and {days[-1]}."),
                ("Name the months of the year.", f"The months are {', '.join(months[:-1])} and {months[-1]}."),
            )
        )
    )


def question(rng: random.Random) -> Turns:
    """One of the written questions."""
    asked, answer = rng.choice(list(facts.QUESTIONS.items()))
    return [_opened(rng, asked), answer]


def animal(rng: random.Random) -> Turns:
    """Where animals live, what they eat, what they are."""
    name, (kind, home, food, trait) = rng.choice(list(knowledge.ANIMAL_FACTS.items()))
    many, one = plural(name), article(name)
    known = f"{_upper(one)} is {kind}. It has {trait}. {_upper(many)} live {home}, and they eat {food}."
    return list(
        rng.choice(
            (
                (_opened(rng, f"Where do {many} live?"), f"{_upper(many)} live {home}."),
                (_opened(rng, f"What do {many} eat?"), f"{_upper(many)} eat {food}."),
                (_opened(rng, f"What is {one}?"), f"{_upper(one)} is {kind}. It has {trait}."),
                (f"Tell me about {many}.", known),
                (f"What do you know about {many}?", known),
                (f"What kind of animal is {one}?", f"{_upper(one)} is {kind}."),
                (
                    f"Where do {many} live?",
                    f"{_upper(many)} live {home}.",
                    "And what do they eat?",
                    f"They eat {food}.",
                ),
            )
        )
    )


def definition(rng: random.Random) -> Turns:
    """What things are."""
    thing, (text,) = rng.choice(list(knowledge.DEFINITIONS.items()))
    verb = "are" if thing in words.PLURAL_TOPICS else "is"
    plain = _opened(rng, f"What {verb} {thing}?")
    return [rng.choice((plain, plain, plain, f"Explain {thing} to a child.", f"Can you explain {thing}?")), text]


_KINDS: tuple[tuple[Callable[[random.Random], Turns], float], ...] = (
    (identity, 0.05),
    (greeting, 0.06),
    (remembered, 0.04),
    (unknown, 0.04),
    (capital, 0.15),
    (word, 0.14),
    (number, 0.11),
    (calendar, 0.05),
    (question, 0.11),
    (animal, 0.14),
    (definition, 0.12),
)


def dialogue(seed: int, i: int) -> Turns:
    """Turns of dialogue `i`; sometimes two of the patterns after another, so that earlier turns are seen."""
    rng = random.Random(f"authored:{seed}:{i}")

    def one() -> Turns:
        return rng.choices([k for k, _ in _KINDS], [w for _, w in _KINDS])[0](rng)

    turns = one()
    while len(turns) < 8 and rng.random() < 0.35:
        turns += one()
    return turns
