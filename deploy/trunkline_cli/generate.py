"""`trunkline generate` and `trunkline models`."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict

from trunkline.client.client import Prompt
from trunkline.errors import NoWorker, TrunklineError
from trunkline.names import lane_name
from trunkline.sampling_params import TABLE
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.validation import LANES
from trunkline_cli.arguments import INT32, UINT32, UINT64, seconds, text, whole
from trunkline_cli.connection import add_connection_arguments, client_of, connection_problem

# The parameters that are a number have a flag, whose value is passed on: name → type. The router validates them.
NUMERIC: dict[str, Callable[[str], float]] = {
    name: float if row.kind is float else whole(0, UINT64 if name == "seed" else UINT32)
    for name, row in TABLE.items()
    if row.kind in (float, int)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", type=text, help="text to continue; with --chat, the user's message; - reads standard input"
    )
    add_connection_arguments(parser)
    parser.add_argument(
        "--model", type=text, default="", metavar="NAME", help="served model name; default: the router's only model"
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--system", type=text, metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("--stream", action="store_true", help="print text as it arrives")
    parser.add_argument("--json", action="store_true", help="print responses as JSON lines")
    parser.add_argument("--n", type=whole(0, UINT32), help="number of choices")
    parser.add_argument(
        "--stop", type=text, action="append", default=[], metavar="TEXT", help="stop string; may be given several times"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="continue past end-of-sequence tokens")
    parser.add_argument("--timeout-s", type=seconds, metavar="SECONDS", help="deadline")
    parser.add_argument(
        "--lane", choices=tuple(LANES),
        help="priority (default: standard); the router's tenants file must grant the interactive lane, "
        "otherwise the request runs in the standard one",
    )  # fmt: skip
    parser.add_argument("--tenant", default="", metavar="NAME", help="the tenant that the request is counted for")
    parser.add_argument("--session", default="", metavar="NAME", help="groups requests, for example by conversation")
    parser.add_argument(
        "--stop-token-id", type=whole(0, INT32), action="append", default=[], metavar="ID",
        help="token that ends the output; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=VALUE",
        help="added to a token's logit, -100 to 100; may be given several times",
    )  # fmt: skip
    for name, kind in NUMERIC.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help=TABLE[name].help)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return whole(0, INT32)(token_id), float(value)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-1.5") from None


def run(arguments: argparse.Namespace) -> int:
    try:
        asyncio.run(_generate(arguments))
    except (TrunklineError, ValueError) as error:
        print(f"trunkline generate: {_problem(error, arguments)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output at exit
        return 128 + signal.SIGPIPE
    return 0


async def _generate(arguments: argparse.Namespace) -> None:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt: Prompt = text
    if arguments.chat:
        system = [("system", arguments.system)] if arguments.system else []
        prompt = [*system, ("user", text)]
    options: dict[str, Any] = {name: getattr(arguments, name) for name in NUMERIC}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"n": arguments.n, "stop": arguments.stop, "ignore_eos": arguments.ignore_eos, "lane": arguments.lane}
    options |= {"session": arguments.session}
    options |= {"stop_token_ids": arguments.stop_token_id, "logit_bias": dict(arguments.logit_bias)}
    async with client_of(arguments, model=arguments.model, tenant=arguments.tenant) as client:
        if arguments.json:
            last = None
            async for piece in client.generate(prompt, timeout_s=arguments.timeout_s, **options):
                if piece.response is not last:
                    last = piece.response
                    _warn_of_lower_lane(arguments.lane, last.prompt)
                    print(json.dumps(MessageToDict(last, preserving_proto_field_name=True)), flush=True)
        elif arguments.stream and (arguments.n or 1) == 1:
            before = "" if arguments.chat else text  # is printed with the first output: until then the call may fail
            async for piece in client.generate(prompt, timeout_s=arguments.timeout_s, **options):
                _warn_of_lower_lane(arguments.lane, piece.response.prompt)
                print(before + piece.text, end="", flush=True)
                before = ""
            print(before)
        else:
            done = await client.complete(prompt, timeout_s=arguments.timeout_s, **options)
            _warn_of_lower_lane(arguments.lane, done.prompt)
            for choice in done.choices:
                print(choice.text if arguments.chat else text + choice.text)


def _warn_of_lower_lane(asked: str | None, prompt: PromptInfo) -> None:
    """Prints to standard error that the request runs in a lower lane than requested. Only the first response has the
    lane, so each request prints one line at most."""
    if asked is not None and prompt.lane > LANES[asked]:
        print(
            f"trunkline generate: runs in the {lane_name(prompt.lane)} lane: "
            f"the tenants file does not grant the {asked} one",
            file=sys.stderr,
        )


def list_models(arguments: argparse.Namespace) -> int:
    async def show() -> None:
        async with client_of(arguments) as client:
            for model in await client.list_models():
                print(f"{model.name}\tcontext {model.context_length}\tworkers {model.ready_workers}")

    try:
        asyncio.run(show())
    except (TrunklineError, ValueError) as error:
        print(f"trunkline models: {_problem(error, arguments)}", file=sys.stderr)
        return 1
    return 0


def _problem(error: TrunklineError | ValueError, arguments: argparse.Namespace) -> str:
    """The error in one line. One without a reason comes from gRPC, when no server answered."""
    if isinstance(error, NoWorker) and not error.reason:
        return connection_problem(arguments.server, str(error), arguments)
    return str(error)
