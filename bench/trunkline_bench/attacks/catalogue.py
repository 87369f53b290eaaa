"""All attacks: the attacker, its victims, and the bounds that must hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trunkline_bench.attacks.attack_result import Bounds
from trunkline_bench.attacks.host_faults import HOST_FAULTS
from trunkline_bench.attacks.innocent import NEW_SCHEMAS, SEVERAL_TOKENS
from trunkline_bench.attacks.vectors.attacker import ALL_OF_1_TO_5, HOLDING, OF_1_TO_5, UNREAD_STREAMS
from trunkline_bench.attacks.vectors.calls import MALFORMED, SMALL_CALLS
from trunkline_bench.attacks.vectors.floods import FLOODS
from trunkline_bench.attacks.vectors.guided_floods import GUIDED_FLOODS
from trunkline_bench.attacks.vectors.http_floods import (
    HOLDING_HTTP,
    HTTP_FLOODS,
    SMALL_HTTP_REQUESTS,
    UNREAD_HTTP_STREAMS,
)
from trunkline_bench.attacks.vectors.lies import LIES
from trunkline_bench.attacks.vectors.redis_entries import ATTACKS as REDIS_ATTACKS
from trunkline_bench.attacks.vectors.sessions import SESSIONS
from trunkline_bench.attacks.window import HOLD_S, Window, fixed, until_enough

NONE = "none"
MINUTE_S = 60.0
UNREAD_S = 20.0  # producing gigabytes of output takes this long
ORDINARY = Bounds()


class Section(Enum):
    """Attacker and victim. The value is the heading in the report."""

    CLIENT = "A client attacks a router"
    HTTP = "A client attacks the HTTP port of a router"
    TENANT = "A noisy tenant shares a worker"
    GUIDED = "A noisy tenant sends grammars, tools and limits of reasoning"
    PORT = "A client attacks a worker's own port"
    KEYED_PORT = "A stranger attacks the port of a worker with a key"
    LIAR = "A broken worker beside two good ones"
    REDIS = "False entries in Redis"
    HOST = "Faults of a router's host"
    NAMESAKE = "A deadly request under another tenant's request id"


@dataclass(frozen=True, slots=True)
class Case:
    """One attack. `asks`: kind of request that the innocent tenant sends meanwhile.

    is_beside_others: the bound on the innocent's p99 is the one for tenants that share a worker, not that of `bounds`
    seconds: how long the innocent is measured; None: the caller chooses
    """

    section: Section
    attack: str
    asks: str = "text"
    bounds: Bounds = ORDINARY
    is_beside_others: bool = False
    seconds: float | None = None

    @property
    def name(self) -> str:
        return self.attack if self.asks == "text" else f"{self.attack}; {self.asks}"

    def window(self, least_s: float) -> Window:
        """How long the innocent is measured. `least_s`: the caller's choice, used unless the attack fixes the time."""
        if self.seconds is not None:
            return fixed(self.seconds)
        return fixed(HOLD_S) if self.attack in HOLDING else until_enough(least_s)


def _clients() -> list[Case]:
    refused = Bounds(statuses=("INVALID_ARGUMENT",))
    # A connection has up to 1,000 calls open, and each takes up to half a millisecond to accept: docs/attacks.md.
    full_connection = Bounds(p99_ms=500.0)
    names = (
        *OF_1_TO_5,
        *SMALL_CALLS,
        "10,000 health watches",
        "10,000 reflection streams",
        "ping flood",
        "SETTINGS flood",
        "CONTINUATION flood",
        "cancelled requests",
        "5,000 idle connections",
        "deadlines of 1 ns and of 11,000 years",
    )
    return [
        Case(Section.CLIENT, NONE),
        *(
            Case(
                Section.CLIENT,
                name,
                bounds=full_connection if name == "rapid reset" else ORDINARY,
                is_beside_others=name in SMALL_CALLS,
            )
            for name in names
        ),
        *(Case(Section.CLIENT, name, bounds=refused) for name in MALFORMED),
        Case(Section.CLIENT, UNREAD_STREAMS, seconds=UNREAD_S),
        Case(Section.CLIENT, ALL_OF_1_TO_5, seconds=MINUTE_S),
    ]


def _over_http() -> list[Case]:
    return [
        Case(Section.HTTP, NONE),
        *(
            Case(
                Section.HTTP,
                name,
                is_beside_others=name == SMALL_HTTP_REQUESTS,
                seconds=UNREAD_S if name == UNREAD_HTTP_STREAMS else None,
            )
            for name in (*HTTP_FLOODS, *HOLDING_HTTP)
        ),
    ]


def _tenants() -> list[Case]:
    kinds = {"600 chats of 1 MiB at once": ("chat", "token ids"), "conversations of 4,096 messages": ("chat",)}
    return [
        *(Case(Section.TENANT, NONE, asks) for asks in ("text", "chat", "token ids")),
        *(
            Case(Section.TENANT, name, asks, is_beside_others=True)
            for name in (*FLOODS, "conversations of 4,096 messages")
            for asks in kinds.get(name, ("text",))
        ),
    ]


def _guided() -> list[Case]:
    return [
        Case(Section.GUIDED, attack, asks, is_beside_others=attack != NONE)
        for attack in (NONE, *GUIDED_FLOODS)
        for asks in (SEVERAL_TOKENS, NEW_SCHEMAS)
    ]


def _ports() -> list[Case]:
    held = ("10,000 unread tokenizers", "10,000 idle sessions", "10,000 health watches", "10,000 reflection streams")
    open_to_all = (*SESSIONS, *held, "10,000 unread cache watches", "rapid reset of a worker")
    keyed = ("sessions with 63 MiB of nothing known", "sessions with 8 MiB of empty submits", *held)
    return [
        *(Case(Section.PORT, name) for name in (NONE, *open_to_all)),
        *(Case(Section.KEYED_PORT, name) for name in (NONE, *keyed)),
    ]


def cases() -> Sequence[Case]:
    """All cases, in the order in which they run."""
    return (
        *_clients(),
        *_over_http(),
        *_tenants(),
        *_guided(),
        *_ports(),
        *(Case(Section.LIAR, name) for name in (NONE, *LIES)),
        *(Case(Section.REDIS, name) for name in (NONE, *REDIS_ATTACKS)),
        *(Case(Section.HOST, name) for name in (NONE, *HOST_FAULTS)),
        Case(
            Section.NAMESAKE, "a deadly request under another's name", bounds=Bounds(p99_ms=5_000.0)
        ),  # two of three workers are lost
    )
