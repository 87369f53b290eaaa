"""The generated corpus of the demo model: small tales, and small chats about them, from a grammar and a seed."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import chats
import lexicon
import plots
from chats import Message, TaleRequest
from plots import Plot

_PRONOUNS: dict[str, tuple[str, str, str]] = {"he": ("him", "his", "himself"), "she": ("her", "her", "herself")}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_QUOTE_END = re.compile(r'([^?!.])\{q\}"')
_A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=(?:[aeioAEIO]|u(?!n(?:i|e\b)|s)|U(?!ni|s)))")
_SENTENCE_START = re.compile(r'((?:^|[a-z0-9][.!?] |[.]" |\n)"?)([a-z])')


class Phrase(str):
    """A phrase, and its forms with an article, at the start of a sentence and in a title."""

    @property
    def l(self) -> str:  # noqa: E743
        """The phrase as it is written inside a sentence."""
        return self[:1].lower() + self[1:]

    @property
    def a(self) -> str:
        """The phrase with its indefinite article (a or an is chosen when the sentence is complete)."""
        return f"a {self}"

    @property
    def A(self) -> str:
        """The phrase with its indefinite article, opening a sentence."""
        return f"A {self}"

    @property
    def T(self) -> str:
        """The phrase in title case."""
        small = {"a", "the", "of", "in", "on", "at", "by"}
        return " ".join(word if word in small else word[:1].upper() + word[1:] for word in self.split())


class Thing(Phrase):
    """The main object of a tale, such as a red kite."""

    adj: str

    @classmethod
    def draw(cls, rng: random.Random) -> Thing:
        """Choose a thing and an adjective that suits it."""
        noun = rng.choice(_THINGS)
        thing = cls(noun)
        thing.adj = rng.choice(lexicon.THINGS[noun].split("|"))
        return thing

    @property
    def full(self) -> str:
        """The noun with its adjective."""
        return f"{self.adj} {self}"

    @property
    def FT(self) -> str:
        """The noun with its adjective, in title case."""
        return Phrase(self.full).T

    @property
    def a(self) -> str:
        """The thing when first mentioned."""
        return f"a {self.full}"


class Place(Phrase):
    """A place, with the preposition that goes with it."""

    @property
    def at(self) -> str:
        """The place with its preposition, as in "by the river"."""
        return f"{lexicon.PREPOSITIONS[self]} {self}"

    @property
    def atT(self) -> str:
        """The place with its preposition, in title case."""
        return Phrase(self.at).T


@dataclass(frozen=True)
class Character:
    """A character of a tale, with the words that the grammar needs for it."""

    name: str
    kind: str
    he: str
    trait: str = ""
    size: str = ""
    home: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def him(self) -> str:
        """Object pronoun."""
        return _PRONOUNS[self.he][0]

    @property
    def his(self) -> str:
        """Possessive pronoun."""
        return _PRONOUNS[self.he][1]

    @property
    def himself(self) -> str:
        """Reflexive pronoun."""
        return _PRONOUNS[self.he][2]

    @property
    def He(self) -> str:
        """Subject pronoun opening a sentence."""
        return self.he.capitalize()

    @property
    def His(self) -> str:
        """Possessive pronoun opening a sentence."""
        return self.his.capitalize()

    @property
    def plain(self) -> str:
        """Description without a name."""
        words = [word for word in (self.trait, "" if self.trait == "small" else self.size, self.kind) if word]
        return "a " + " ".join(words)

    @property
    def a(self) -> str:
        """Description at the first mention."""
        return f"{self.plain} named {self.name}" if self.name else self.plain

    @property
    def A(self) -> str:
        """Description opening a sentence."""
        return self.a[:1].upper() + self.a[1:]

    @property
    def the(self) -> str:
        """Description at a later mention."""
        return f"the {self.kind}"

    @property
    def The(self) -> str:
        """Description at a later mention, opening a sentence."""
        return f"The {self.kind}"

    @property
    def tag(self) -> str:
        """The words after an animal's name that say which animal it is."""
        return "" if self.kind in ("girl", "boy") else f" the {self.kind}"


@dataclass
class Tale:
    """One tale, and the facts about it that chats use."""

    title: str
    paragraphs: list[str]
    hero: Character
    thing: Thing
    place: Place
    topics: list[str] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The tale as plain text, without its title."""
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Document:
    """One training document: plain text, or the messages of a chat."""

    text: str = ""
    messages: tuple[Message, ...] = ()


_THINGS = tuple(lexicon.THINGS)
_KINDS = tuple(lexicon.ANIMALS)
_ALL_PLACES = tuple(lexicon.PLACES)
_OPEN_PLACES = tuple(place for place in _ALL_PLACES if place not in lexicon.TOWN_PLACES)


@cache
def _uses_friend(plot: Plot) -> bool:
    return any("{f" in sentence for paragraph in plot.paragraphs for sentence in paragraph)


class Teller:
    """Generates tales and chats from one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def fill(self, template: str, slots: dict[str, object]) -> str:
        """Choose among the alternatives of a template and fill in its slots."""
        choice = self.rng.choice
        text = template
        while "[" in text:
            text = _CHOICE.sub(lambda match: choice(match.group(1).split("|")), text)
        if "{q}" in text:
            text = _QUOTE_END.sub(lambda m: m.group(1) + ('."' if m.end() == len(m.string) else ',"'), text)
            text = text.replace("{q}", "")
        text = text.format_map(slots)
        # Slots may contain templates themselves (a look around, a spot).
        return self.fill(text, slots) if "[" in text or "{" in text else text

    def tale(self, request: TaleRequest | None = None, episodes: int = 1, detail: float | None = None) -> Tale:
        """Generate one tale, with one or more episodes about the same hero."""
        rng = self.rng
        request = request or TaleRequest()
        detail = rng.choice((0.0, 0.3, 0.6, 1.0)) if detail is None else detail
        hero = self._hero(request)
        friend = self._other(hero, {hero.name}, {hero.kind})
        elder_name, elder_he = rng.choice(lexicon.ELDERS)
        elder = Character(elder_name, "elder", elder_he)
        chosen = rng.sample(plots.PLOTS, episodes)
        if request.plot is not None:
            chosen[0] = request.plot
        uses_friend = any(_uses_friend(plot) for plot in chosen)
        tale: Tale | None = None
        for number, plot in enumerate(chosen):
            slots = self._slots(plot, hero, friend, elder, number, request)
            knows_friend = number > 0 or (uses_friend and (plot not in (plots.LOST, plots.BAKE) or rng.random() < 0.5))
            slots["friend"] = "{f}" if knows_friend else f"{hero.his} friend {friend}{friend.tag}"
            paragraphs = [self._paragraph(paragraph, slots, detail) for paragraph in plot.paragraphs]
            if tale is None:
                opening = self._opening(slots, plot, knows_friend, detail)
                paragraphs.insert(0, opening)
                if detail < 0.5 and rng.random() < 0.5:
                    paragraphs[:2] = [" ".join(paragraphs[:2])]
                tale = Tale(
                    title=self._polish(self.fill(rng.choice(plot.titles), slots)),
                    paragraphs=[],
                    hero=hero,
                    thing=slots["o"],  # type: ignore[arg-type]
                    place=slots["p"],  # type: ignore[arg-type]
                )
            lesson = self.fill(rng.choice(plot.lessons), slots)
            if number == episodes - 1:
                if rng.random() < 0.35:
                    lesson += " " + self.fill(rng.choice(plots.ENDINGS), slots)
                if rng.random() < 0.2:
                    lesson += " The end."
            paragraphs.append(lesson)
            if detail < 0.5 and rng.random() < 0.5:
                paragraphs[-2:] = [" ".join(paragraphs[-2:])]
            tale.paragraphs += [self._polish(paragraph) for paragraph in paragraphs]
            tale.topics += [self._articles(self.fill(topic, slots)) for topic in plot.topics]
            tale.questions += [
                (self._polish(self.fill(question, slots)), self._polish(self.fill(answer, slots)))
                for question, answer in plot.questions
            ]
        assert tale is not None
        return tale

    def short_tale(self, request: TaleRequest | None = None) -> Tale:
        """Generate a tale of a few sentences."""
        rng = self.rng
        hero = self._hero(request or TaleRequest())
        friend = self._other(hero, {hero.name}, {hero.kind})
        elder_name, elder_he = rng.choice(lexicon.ELDERS)
        slots = self._slots(plots.CALM_DAY, hero, friend, Character(elder_name, "elder", elder_he), 0, TaleRequest())
        text = self._polish(self.fill(rng.choice(chats.SHORT_TALES), slots))
        return Tale(title="", paragraphs=[text], hero=hero, thing=slots["o"], place=slots["p"])  # type: ignore[arg-type]

    def chat(self) -> tuple[Message, ...]:
        """Generate a chat of one to three exchanges."""
        rng = self.rng
        messages: list[Message] = []
        if rng.random() < 0.3:
            messages.append(Message("system", rng.choice(chats.SYSTEM_PROMPTS)))
        kind = rng.random()
        if kind < 0.52:
            if rng.random() < 0.15:
                messages += self._small_talk()
            messages += self._request_and_tale()
            if rng.random() < 0.15:
                messages += self._thanks()
        elif kind < 0.72:
            messages += self._questions_about_a_tale()
        elif kind < 0.90:
            messages += self._facts()
        else:
            messages += self._small_talk()
            if rng.random() < 0.4:
                messages += self._facts()
        return tuple(messages)

    def document(self) -> Document:
        """Generate one training document."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.25:
            return Document(messages=self.chat())
        if kind < 0.31:
            return Document(text=self.short_tale().text)
        if kind < 0.70:
            tale = self.tale()
        elif kind < 0.85:
            tale = self.tale(episodes=2)
        elif kind < 0.92:
            tale = self.tale(episodes=3)
        elif kind < 0.96:
            tale = self.tale(episodes=rng.randint(5, 8))
        else:
            book = [self.tale() for _ in range(rng.randint(2, 6))]
            return Document(text="\n\n".join(f"{tale.title}\n\n{tale.text}" for tale in book))
        heading = rng.random()
        if heading < 0.12:
            return Document(text=f"{tale.title}\n\n{tale.text}")
        if heading < 0.2 and len(tale.paragraphs) > 3:
            # A prompt may come from the middle of a tale, so some documents start there.
            return Document(text="\n\n".join(tale.paragraphs[rng.randint(1, 2) :]))
        return Document(text=tale.text)

    def _hero(self, request: TaleRequest) -> Character:
        rng = self.rng
        kind = request.kind or (rng.choice(("girl", "boy")) if rng.random() < 0.4 else rng.choice(_KINDS))
        hero = self._character(kind, set(), trait=rng.choice(tuple(lexicon.TRAITS)))
        return (
            hero
            if not request.name
            else Character(request.name, hero.kind, request.he or hero.he, hero.trait, hero.size, hero.home)
        )

    def _character(self, kind: str, taken: set[str], trait: str = "") -> Character:
        rng = self.rng
        he = {"girl": "she", "boy": "he", "hen": "she", "cow": "she"}.get(kind) or rng.choice(("he", "she"))
        people = lexicon.GIRLS if he == "she" else lexicon.BOYS
        names = people if kind in ("girl", "boy") or rng.random() < 0.25 else lexicon.PET_NAMES
        name = rng.choice(names)
        while name in taken:
            name = rng.choice(names)
        home = rng.choice(("small", "cosy", "little", "snug")) + " " + lexicon.ANIMALS.get(kind, "house")
        size = rng.choice(("little", "little", "young", "")) if trait else rng.choice(("", "", "young"))
        return Character(name, kind, he, trait, size, f"a {home}")

    def _other(self, hero: Character, names: set[str], kinds: set[str]) -> Character:
        rng = self.rng
        if hero.kind in ("girl", "boy"):
            kind = rng.choice(("girl", "boy")) if rng.random() < 0.7 else rng.choice(_KINDS)
        else:
            kind = rng.choice(_KINDS)
        while kind in kinds and kind not in ("girl", "boy"):
            kind = rng.choice(_KINDS)
        return self._character(kind, names)

    def _slots(
        self, plot: Plot, hero: Character, friend: Character, elder: Character, number: int, request: TaleRequest
    ) -> dict[str, object]:
        rng = self.rng
        kinds = {hero.kind, friend.kind}
        newcomer = self._other(hero, {hero.name, friend.name}, kinds)
        passer_by = rng.choice([kind for kind in lexicon.PASSERS_BY if kind not in kinds | {newcomer.kind}])
        place = Place(request.place or rng.choice(_ALL_PLACES if plot.anywhere else _OPEN_PLACES))
        looks = rng.sample(lexicon.PLACES[place], 2)
        snack = rng.choice(lexicon.SNACKS)
        snack2 = rng.choice([wild for wild in lexicon.WILD_SNACKS if wild != snack])
        skill = rng.choice(plots.SKILLS)
        hobbies = [hobby for hobby in lexicon.HOBBIES if skill.split()[0] not in hobby]
        hobby, hobby2 = rng.sample(hobbies, 2)
        if number:
            when = dull = rng.choice(plots.LATER)
        else:
            when = rng.choice(
                ("One day", "One morning", "One afternoon", f"One {rng.choice(lexicon.DAY_WORDS)} morning",
                 f"One {rng.choice(lexicon.DAY_WORDS)} day", f"One {rng.choice(lexicon.DAY_WORDS)} afternoon",
                 f"One {rng.choice(lexicon.PARTS)}")
            )  # fmt: skip
            dull = rng.choice(("One grey afternoon", "One cloudy day", "One warm afternoon", "One day", "One evening"))
        return {
            "h": hero, "f": friend, "n": newcomer, "e": elder,
            "x": Character("", passer_by, rng.choice(("he", "she")), rng.choice(("old", "little", "small", "young"))),
            "o": Thing.draw(rng), "p": place, "look": Phrase(" ".join(looks[: rng.randint(1, 2)])),
            "food": rng.choice(lexicon.FOODS), "cake": rng.choice(lexicon.BAKED), "snack": Phrase(snack), "snack2": snack2,
            "plant": Phrase(rng.choice(lexicon.PLANTS)), "spot": rng.choice(lexicon.SPOTS), "seat": rng.choice(lexicon.SEATS),
            "skill": Phrase(skill), "build": Phrase(rng.choice(plots.BUILDS)), "hobby": hobby, "hobby2": hobby2,
            "land": rng.choice(lexicon.LANDS), "when": Phrase(when), "dull": Phrase(dull),
        }  # fmt: skip

    def _opening(self, slots: dict[str, object], plot: Plot, knows_friend: bool, detail: float) -> str:
        rng = self.rng
        hero = slots["h"]
        assert isinstance(hero, Character)
        sentences = [rng.choice(plots.OPENINGS)]
        if rng.random() < 0.4 + 0.6 * detail:
            sentences.append(lexicon.TRAITS[hero.trait])
        if rng.random() < 0.3 + 0.4 * detail:
            sentences.append(rng.choice(plots.HOBBY_LINES))
        if knows_friend:
            sentences.append(rng.choice(plots.FRIEND_LINES))
        return " ".join(self.fill(sentence, slots) for sentence in sentences)

    def _paragraph(self, paragraph: tuple[str, ...], slots: dict[str, object], detail: float) -> str:
        sentences: list[str] = []
        for sentence in paragraph:
            if sentence.startswith("?"):
                if self.rng.random() >= detail:
                    continue
                sentence = sentence[1:]
            filled = self.fill(sentence, slots)
            if sentences and sentences[-1].endswith('"') and filled.startswith('"'):
                # A new speaker starts a new paragraph.
                filled = f"{sentences.pop()}\n\n{filled}"
            sentences.append(filled)
        return " ".join(sentences)

    def _polish(self, text: str) -> str:
        return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), self._articles(text))

    def _articles(self, text: str) -> str:
        return _A_BEFORE_VOWEL.sub(r"\1n ", text)

    def _request_and_tale(self) -> list[Message]:
        rng = self.rng
        request = TaleRequest()
        template, needs = rng.choice(chats.TALE_REQUESTS)
        if "kind" in needs:
            request.kind = rng.choice(_KINDS) if rng.random() < 0.8 else rng.choice(("girl", "boy"))
        if "name" in needs:
            request.kind = request.kind or rng.choice(("girl", "boy"))
            request.he = {"girl": "she", "boy": "he"}.get(request.kind, rng.choice(("he", "she")))
            people = lexicon.GIRLS if request.he == "she" else lexicon.BOYS
            request.name = rng.choice(people if request.kind in ("girl", "boy") else lexicon.PET_NAMES)
        if "place" in needs:
            request.place = rng.choice(_OPEN_PLACES)
            request.plot = rng.choice((plots.NEW_FRIEND, plots.RESCUE, plots.PICNIC, plots.STORM, plots.CALM_DAY))
        if "thing" in needs:
            request.plot = rng.choice((plots.LOST, plots.SHARE, plots.GIVE))
        if "short" in needs:
            tale = self.short_tale(request)
        else:
            tale = self.tale(request, episodes=2 if "long" in needs else 1, detail=None if "long" in needs else 0.3)
        asked = template.format(
            kind=tale.hero.kind, name=tale.hero.name, place=Phrase(tale.place), at=tale.place.at, thing=tale.thing.a,
            topic=rng.choice(tale.topics) if tale.topics else "", title=tale.title,
        )  # fmt: skip
        told = tale.text
        lead = rng.random()
        if lead < 0.12:
            told = rng.choice(chats.TALE_LEADS) + "\n\n" + told
        elif lead < 0.2 and tale.title:
            told = tale.title + "\n\n" + told
        return [Message("user", self._articles(asked)), Message("assistant", told)]

    def _questions_about_a_tale(self) -> list[Message]:
        rng = self.rng
        tale = self.tale(detail=0.0)
        hero = tale.hero
        questions = [
            *tale.questions,
            ("Who is the story about?", self._polish(f"The story is about {hero.a}.")),
            (f"What is {hero.name}?", self._polish(f"{hero.name} is {hero.plain}.")),
            ("What is the name of the hero?", f"The hero is {hero.name}."),
            ("Give the story a title.", tale.title),
        ]
        asked = rng.sample(questions, rng.randint(1, 3))
        first = rng.choice(chats.READ_THIS).format(tale=tale.text, question=asked[0][0])
        messages = [Message("user", first), Message("assistant", asked[0][1])]
        for question, answer in asked[1:]:
            messages += [Message("user", question), Message("assistant", answer)]
        return messages

    def _facts(self) -> list[Message]:
        messages: list[Message] = []
        for _ in range(self.rng.choice((1, 1, 2))):
            question, answer = self.rng.choice(chats.ALL_FACTS)
            messages += [
                Message("user", self._polish(self.fill(question, {}))),
                Message("assistant", self._polish(self.fill(answer, {}))),
            ]
        return messages

    def _small_talk(self) -> list[Message]:
        questions, answers = self.rng.choice(chats.SMALL_TALK)
        return [Message("user", self.rng.choice(questions)), Message("assistant", self.rng.choice(answers))]

    def _thanks(self) -> list[Message]:
        questions, answers = chats.THANKS
        return [Message("user", self.rng.choice(questions)), Message("assistant", self.rng.choice(answers))]


def documents(seed: int) -> Iterator[Document]:
    """Generate an endless stream of documents; the same seed gives the same documents."""
    teller = Teller(random.Random(seed))
    while True:
        yield teller.document()


def main() -> None:
    """Print some documents."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for _, document in zip(range(arguments.count), documents(arguments.seed), strict=False):
        for message in document.messages:
            print(f"<{message.role}> {message.content}")
        print(document.text + "\n" + "-" * 40)


if __name__ == "__main__":
    main()
