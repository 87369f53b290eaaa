"""The `trunkline` command."""

import argparse
import os
import sys
from importlib.metadata import version

from trunkline_cli import drain, generate, launcher
from trunkline_cli.arguments import MOST_PORT, Parser, host, text, whole
from trunkline_cli.child import script
from trunkline_cli.connection import add_connection_arguments
from trunkline_cli.console import console
from trunkline_cli.gpus import visible_gpus
from trunkline_cli.liveness import CHART_PROBE
from trunkline_cli.passed_flags import FlagError, PassedFlags
from trunkline_cli.plan import ClusterPlan, LaunchError, has_metrics

BENCHES = {
    "simulate": "trunkline_bench.simulation.main",
    "simulate-fleet": "trunkline_bench.simulation.fleet.main",
}
KEYS = "trunkline_router.access.keys.keys_command"

MOST_THREADS = 4096  # a worker's own bound


HTTP_PORT = 8000  # as of trunkline-router
METRICS_PORT = 9101


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["router"], ["worker"]):
        command = script(f"trunkline-{arguments[0]}")
        try:
            os.execvp(command, [command, *arguments[1:]])
        except OSError as error:
            sys.exit(f"trunkline {arguments[0]}: {command}: {error.strerror}")
    if arguments[:1] == ["keys"]:  # -P: modules in the working directory must not be in the way of installed ones
        os.execv(sys.executable, [sys.executable, "-P", "-m", KEYS, *arguments[1:]])
    if arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in BENCHES:
        os.execv(sys.executable, [sys.executable, "-m", BENCHES[arguments[1]], *arguments[2:]])
    parser = Parser(prog="trunkline", description="An LLM serving cluster.")
    parser.add_argument("--version", action="version", version=f"trunkline {version('trunkline')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate.add_arguments(commands.add_parser("generate", help="generate text from a prompt"))
    models = commands.add_parser("models", help="list the served models")
    add_connection_arguments(models)
    drain.add_arguments(commands.add_parser("drain", help="let a worker finish its requests and admit no new ones"))
    serve = commands.add_parser("serve", help="run a router and workers on this machine")
    add_serve_arguments(serve)
    commands.add_parser("router", help="run a router (trunkline router --help)")
    commands.add_parser("worker", help="run a worker (trunkline worker --help)")
    commands.add_parser("keys", help="create, list, revoke and seal API keys (trunkline keys --help)")
    bench = commands.add_parser("bench", help="measure without a device").add_subparsers(
        dest="bench", required=True, metavar="COMMAND"
    )
    bench.add_parser("simulate", help="replay a trace in virtual time (trunkline bench simulate --help)")
    bench.add_parser(
        "simulate-fleet", help="route a trace over workers in virtual time (trunkline bench simulate-fleet --help)"
    )
    parsed, rest = parser.parse_known_args(arguments)
    if rest and parsed.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        flags = PassedFlags.of(rest)
    except FlagError as error:
        serve.error(str(error))
    sys.exit(run(parsed, flags))


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Processes that die or hang are started again. Flags of the router (trunkline router --help) are passed to the "
        "router, those of workers (trunkline worker --help) to every worker, and flags of both, such as "
        "--allow-plaintext and --allow-anonymous, to all. On another address than a loopback one, both are needed. "
        "The router stores responses, as with --max-stored-responses 1000."
    )
    parser.add_argument(
        "--model", required=True, metavar="PATH|ID", help="directory in Hugging Face layout, GGUF file, or hub id"
    )
    parser.add_argument(
        "--name", type=text, default="", help="served model name; default: the base name of directory or file"
    )
    parser.add_argument(
        "--workers", type=whole(1, MOST_PORT), default=2, metavar="N", help="how many workers (default: %(default)s)"
    )
    parser.add_argument("--host", type=host, default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=whole(1, MOST_PORT), default=50051, metavar="PORT", help="the router's (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-port", type=whole(1, MOST_PORT), default=50061, metavar="PORT",
        help="the first worker's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--http-port", type=whole(-1, MOST_PORT), default=int(os.environ.get("TRUNKLINE_HTTP_PORT", HTTP_PORT)),
        metavar="PORT", help="the router's HTTP port; -1: no HTTP (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-port", type=whole(-1, MOST_PORT), default=os.environ.get("TRUNKLINE_METRICS_PORT"), metavar="PORT",
        help="the first worker's port for metrics; the others have the next ones; -1: none "
        f"(default: {METRICS_PORT}, where the workers may serve metrics; the router serves its own on its HTTP port)",
    )  # fmt: skip
    parser.add_argument(
        "--no-liveness", action="store_true", help="do not restart processes that hang: for a debugger, for example"
    )
    parser.add_argument(
        "--verbose", action="store_true",
        help="on a terminal: print the logs of all processes; default: one line for each milestone, logs in files",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=whole(1, MOST_THREADS), metavar="N",
        help="CPU threads per worker; default: an equal share of the cores",
    )  # fmt: skip


def run(parsed: argparse.Namespace, flags: PassedFlags) -> int:
    if parsed.command == "generate":
        return generate.run(parsed)
    if parsed.command == "models":
        return generate.list_models(parsed)
    if parsed.command == "drain":
        return drain.run(parsed)
    try:
        plan = ClusterPlan(
            model=launcher.find_model(parsed.model),
            name=served_name(parsed.name, parsed.model),
            workers=parsed.workers,
            host=parsed.host,
            port=parsed.port,
            worker_port=parsed.worker_port,
            flags=flags,
            threads=parsed.threads,
            http_port=parsed.http_port,
            metrics_port=metrics_port(parsed.metrics_port, parsed.host, flags.workers),
            gpus=visible_gpus(),
        )
    except LaunchError as error:
        print(f"trunkline serve: {error}", file=sys.stderr)
        return 1
    probe = None if parsed.no_liveness else CHART_PROBE
    return launcher.serve(plan, probe=probe, console=console(is_verbose=parsed.verbose))


def metrics_port(given: int | None, host: str, worker_arguments: tuple[str, ...]) -> int:
    """The first worker's port for metrics; -1: none."""
    if given is not None:
        return given
    return METRICS_PORT if has_metrics(host, worker_arguments) else -1


def served_name(name: str, model: str) -> str:
    """The name, or that of the model's directory or file if it is empty. Raises LaunchError if that is not UTF-8."""
    name = name or os.path.basename(os.path.abspath(model)).removesuffix(".gguf")
    try:
        return text(name)
    except argparse.ArgumentTypeError:
        raise LaunchError(
            f"the directory's name {name!r} is not UTF-8: give the model another one with --name"
        ) from None


if __name__ == "__main__":
    main()
