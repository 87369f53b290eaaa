"""Asks the other routers of the fleet about their requests, and answers them, over Redis.

Routers have no address of each other and no credentials for each other; what they share is Redis and the fleet's
secret. A question is published to all of them, each process answers on the asker's own channel what the viewer may see,
and the asker waits for a bounded time. Nothing is stored. Every process answers for itself alone, so that no answer
waits for another one: a process of the asker's own router says at once that it was asked already (sibling_requests.py).
"""

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from redis.asyncio.connection import parse_url

from trunkline.v1.fleet_pb2 import GetRequestResponse, ListRequestsResponse, OtherRouters
from trunkline_router.observe.lookup.fleet_channel import FleetChannel
from trunkline_router.observe.lookup.question import Answer, Heard, Question
from trunkline_router.observe.lookup.question_budget import QuestionBudget
from trunkline_router.observe.lookup.request_book import RequestBook
from trunkline_router.observe.lookup.sealed_messages import (
    ANSWER,
    QUESTION,
    SEALED_MORE_BYTES,
    FleetMessage,
    MessageSeal,
)
from trunkline_router.quotas.stores.redis_url import PUBLIC_AUTHORITIES, RedisTls
from trunkline_runtime.log import get_logger

FORMAT = 1
ANSWER_S = 0.5  # that a question waits
MOST_QUESTION_BYTES, MOST_ANSWER_BYTES = 32 << 10, 512 << 10
MOST_HEARD_BYTES = 16 << 20  # in the answers to one question
MOST_AGE_S = 60.0  # of a question, by the clocks of two routers: an older one is a repetition
MOST_REPORTED = 64  # problems that are logged


@dataclass(slots=True)
class _Asked:
    """A question that waits for answers."""

    question: Question
    most_answers: int
    heard: dict[str, Answer | None] = field(default_factory=dict)  # by sender
    heard_bytes: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RouterLookup:
    """Asks and answers while run() runs.

    num_others: returns how many other routers are alive
    house: a name that the processes of one router share, unlike any other router's
    unix_s: the clock that other routers' clocks are compared with
    """

    def __init__(
        self,
        url: str,
        key_prefix: str,
        seal: MessageSeal,
        book: RequestBook,
        num_others: Callable[[], int],
        *,
        house: str = "",
        tls: RedisTls = PUBLIC_AUTHORITIES,
        rng: Random,
        unix_s: Callable[[], float] = time.time,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = secrets.token_hex(16)
        self._house = house or self._name
        self._seal = seal
        self._book = book
        self._num_others = num_others
        self._unix_s = unix_s
        self._steady_s = steady_s
        # Channels belong to the whole server, whatever the database.
        self._tag = f"{{{key_prefix.rstrip(':')}}}:lookup:{FORMAT}:{_database(url)}:"
        hears = {self._questions: self._hear_question, self._answers_to(self._name): self._hear_answer}
        self.channel = FleetChannel(url, hears, tls=tls, rng=rng, steady_s=steady_s)
        self.run = self.channel.run
        self._asked: dict[str, _Asked] = {}
        self._may_answer = QuestionBudget(steady_s())
        self._answered_at_s: OrderedDict[str, float] = OrderedDict()  # by id, as long as it could be repeated
        self._may_ask = QuestionBudget(steady_s())
        self._reported: set[str] = set()
        self.num_answered = 0  # questions of others
        self._log = get_logger()

    # Asking

    async def ask(self, question: Question) -> Heard:
        """Returns what the other routers answer in time. A question for one request is over with the first answer that
        has it. Without Redis, and for a viewer that has asked too often, there are no answers."""
        alive = self._num_others()
        asked = _Asked(question, alive)
        if alive and self.channel.is_listening and self._may_ask.takes(question, self._steady_s()):
            question_id = secrets.token_hex(16)
            messages = self._messages(QUESTION, question_id, question.written())
            self._asked[question_id] = asked
            try:
                if self._sends(self._questions, messages, MOST_QUESTION_BYTES):
                    async with asyncio.timeout(ANSWER_S):
                        await asked.done.wait()
            except TimeoutError:
                pass  # the answers that have come count
            finally:
                del self._asked[question_id]
        found = [answer for answer in asked.heard.values() if answer is not None]
        answered = len(asked.heard)
        return Heard(found, OtherRouters(alive=max(alive, answered), answered=answered))

    def _hear_answer(self, sealed: bytes) -> None:
        if len(sealed) > MOST_ANSWER_BYTES + SEALED_MORE_BYTES or not self._asked:
            return
        message = self._opened(sealed, ANSWER)
        asked = None if message is None else self._asked.get(message.question_id)
        if message is None or asked is None or message.sender in asked.heard:
            return
        asked.heard_bytes += len(message.body)
        if asked.heard_bytes > MOST_HEARD_BYTES:
            return
        answer = asked.question.read_answer(message.body) if message.body else None
        asked.heard[message.sender] = answer
        has_found = answer is not None and bool(asked.question.request_id)
        if has_found or len(asked.heard) >= asked.most_answers:
            asked.done.set()

    # Answering

    def _hear_question(self, sealed: bytes) -> None:
        if len(sealed) > MOST_QUESTION_BYTES:
            return
        message = self._opened(sealed, QUESTION)
        if message is None or message.sender == self._name or not self._is_new(message):
            return
        answer = b"" if message.house == self._house else self._answer_of(message)
        if answer is not None:
            self._answered_at_s[message.question_id] = self._unix_s()
            self.num_answered += 1
            messages = self._messages(ANSWER, message.question_id, answer)
            self._sends(self._answers_to(message.sender), messages, MOST_ANSWER_BYTES + SEALED_MORE_BYTES)

    def _answer_of(self, message: FleetMessage) -> bytes | None:
        """The answer to another router's question; None if there are too many questions, or it cannot be read."""
        try:
            question = Question.read(message.body)
        except (ValueError, KeyError, TypeError):
            self._report("a question of another router cannot be read: its version is another one")
            return None
        if not self._may_answer.takes(question, self._steady_s()):
            return None
        return shortened(question.answer_of(self._book), question)

    def _is_new(self, message: FleetMessage) -> bool:
        """Whether a question is neither old nor repeated."""
        now_s = self._unix_s()
        while self._answered_at_s and now_s - next(iter(self._answered_at_s.values())) > 2 * MOST_AGE_S:
            self._answered_at_s.popitem(last=False)
        if not abs(now_s - message.at_unix_s) <= MOST_AGE_S:
            self._report(f"a question of another router is more than {MOST_AGE_S:g} s old: compare the clocks")
            return False
        return message.question_id not in self._answered_at_s

    def _messages(self, kind: str, question_id: str, body: bytes) -> list[bytes]:
        """One message, several times while a key changes. A router that can open several of them answers the first."""
        message = FleetMessage(kind, question_id, self._name, self._house, self._unix_s(), body)
        return self._seal.all_sealed(message)

    def _sends(self, channel: bytes, messages: Sequence[bytes], most_bytes: int) -> bool:
        """Whether any of the messages is sent."""
        return any([len(message) <= most_bytes and self.channel.send(channel, message) for message in messages])

    def _opened(self, sealed: bytes, kind: str) -> FleetMessage | None:
        message = self._seal.opened(sealed)
        if message is None:
            self._report("a message in Redis is not sealed with a secret of this router, and is ignored")
        return message if message is not None and message.kind == kind else None

    @property
    def _questions(self) -> bytes:
        return f"{self._tag}questions".encode()

    def _answers_to(self, name: str) -> bytes:
        return f"{self._tag}answers:{name}".encode()

    def _report(self, problem: str) -> None:
        """Logs each problem once."""
        if problem not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(problem)
            self._log.warning(problem)


def house_of(directory: str) -> str:
    """Returns the name of the router whose processes have this private directory."""
    return hashlib.sha256(directory.encode()).hexdigest()[:32]


def shortened(answer: bytes, question: Question) -> bytes:
    """Returns an answer that is short enough: a long list loses its end, and a request that ran on many workers what
    they said of it."""
    if len(answer) <= MOST_ANSWER_BYTES:
        return answer
    if question.request_id:
        story = GetRequestResponse.FromString(answer)
        for name in ("placements", "attempts_made"):
            story.ClearField(name)
        return story.SerializeToString()
    listed = ListRequestsResponse.FromString(answer)
    while listed.requests and listed.ByteSize() > MOST_ANSWER_BYTES:
        del listed.requests[len(listed.requests) // 2 :]
    return listed.SerializeToString()


def _database(url: str) -> str:
    """The number of the database: two fleets may have one prefix in two of them."""
    return str(parse_url(url).get("db", 0))
