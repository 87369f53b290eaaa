"""Settings of a router's HTTP front."""

import re
from dataclasses import dataclass

from trunkline_runtime.settings import setting

ORIGIN = re.compile(r"https?://[^/\s?#@*]+")  # as browsers send it: without a path


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The HTTP port, and what the endpoints do."""

    http_port: int = setting(8000, help="HTTP port; 0 picks a free one, -1: no HTTP", minimum=-1, maximum=65535)
    http_keep_alive_s: float = setting(
        75.0, help="time after which an HTTP connection without requests is closed", minimum=1.0, maximum=3600.0
    )
    sse_keep_alive_s: float = setting(
        15.0,
        help="a streamed HTTP response without output gets a comment after this time, because proxies cut silent "
        "connections; 0: never",
        minimum=0.0,
        maximum=3600.0,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        metavar="ORIGIN,...",
        help="origins whose web pages may use the HTTP port from a browser, such as https://chat.example.com, "
        "separated by commas; * stands for all; by default none",
    )
    allow_unknown_fields: bool = setting(
        False, help="ignore unknown fields of HTTP requests, and name them in the response header x-trunkline-warning"
    )
    reasoning_field: str = setting(
        "reasoning",
        help="the field of chat completions, in messages and deltas, that has what the model thought before it "
        "answered; reasoning_content: for clients that know this older name alone",
        choices=("reasoning", "reasoning_content"),
    )
    refuse_server_tools: bool = setting(
        False,
        help="refuse requests with tools that run at the servers of OpenAI or Anthropic, such as web_search; by "
        "default the model is not told of these tools, and the response header x-trunkline-warning names them",
    )
    max_stored_responses: int = setting(
        0,
        help="responses of a tenant that /v1/responses keeps, so that clients can retrieve and continue them; 0: none. "
        "Beyond it the oldest goes. They are in this process's memory alone: --processes must be 1, and behind a load "
        "balancer a client must stay on one router",
        minimum=0,
        maximum=1 << 20,
    )
    max_stored_mib: int = setting(
        64,
        help="memory for stored responses, of which a tenant can use a quarter; beyond it the oldest go",
        minimum=1,
        maximum=1 << 20,
    )
    response_ttl_s: float = setting(
        3600.0, help="how long a stored response is kept", minimum=1.0, maximum=30 * 86400.0
    )

    def problem(self, num_processes: int) -> str | None:
        """Returns what is wrong with these settings, in one line; None if they can be used."""
        for origin in self.cors_origins:
            if origin != "*" and ORIGIN.fullmatch(origin) is None:
                allowed = "*, or http:// or https:// with a host and port"
                return f"--cors-origins={origin} is not an origin; allowed: {allowed}"
        if not self.max_stored_responses or num_processes == 1:
            return None
        return (
            f"--max-stored-responses={self.max_stored_responses} needs --processes=1, not {num_processes}: a "
            "process keeps its responses in its own memory, where requests that reach another process do not find them"
        )
