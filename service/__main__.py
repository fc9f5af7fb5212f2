"""The command line. Nothing heavy is imported before a command needs it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from service import options, settings
from service.options import Option, SettingsError
from service.router.settings import ROUTER_OPTIONS

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_F = TypeVar("_F", bound=Callable[..., Any])


def main() -> None:
    """Entry point of `watchkeeper`."""
    # gRPC writes its own lines to stderr; what matters is reported by us.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; every error is one line on stderr.

    Returns:
        The exit code: the command's own, 2 for wrong usage, configuration or surroundings, 130
        after Ctrl-C.
    """
    try:
        with cli.make_context("watchkeeper", list(arguments)) as context:
            code = int(cli.invoke(context) or 0)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "watchkeeper"
        return _complain(f"{error.format_message()} (see '{command} --help')")
    except click.ClickException as error:
        return _complain(error.format_message())
    except SettingsError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _complain(message: str) -> int:
    """Say in one line what is wrong."""
    click.echo(f"watchkeeper: error: {' '.join(message.split())}", err=True)
    return USAGE


# --- how options are declared ------------------------------------------------------------------


def _declare(options: Sequence[Option]) -> Callable[[_F], _F]:
    """Make click options of ours. Values stay text: `service.options` judges all sources alike."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = _click_option(option)(function)
        return click.option(
            "--config", metavar="FILE", help="TOML file; its keys are the names of the options."
        )(function)

    return decorate


def _click_option(option: Option) -> Callable[[_F], _F]:
    default = f"  [default: {option.shown_default}]" if option.shown_default else ""
    if option.kind is options.BOOLEAN:
        flags = f"{option.flag}/--no-{option.flag[2:]}"
        return click.option(flags, option.name, default=None, help=option.help + default)
    return click.option(
        option.flag,
        option.name,
        metavar=option.kind.metavar,
        multiple=option.kind.repeatable,
        help=option.help + default,
    )


class _Command(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


class _ServeCommand(_Command):
    """Keeps what comes after `--` away from our own parsing, and hints at it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        ctx.obj = tuple(args[len(ours) + 1 :])
        try:
            return super().parse_args(ctx, ours)
        except click.NoSuchOption as error:
            if error.possibilities:
                raise
            raise click.UsageError(f"{error.message} Options of the engine come after --.", ctx) from error


class _Group(click.Group):
    """Lists commands in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"watchkeeper {version('watchkeeper')}")
        except PackageNotFoundError:
            click.echo("watchkeeper (not installed)")
        context.exit()


@click.group(cls=_Group, context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def cli() -> None:
    """Keeps the watch over an inference engine: takes orders from a message bus, and tells probes,
    routers and trainers what the engine may do now.

    Each option of a command can also be given as the variable WATCHKEEPER_<NAME>, as in
    WATCHKEEPER_GRACE_PERIOD_S=10, or in a TOML file with --config. The flag wins over the variable,
    the variable over the file.

    Exit codes: 0 all went well, 2 wrong usage, configuration or surroundings; see each command for
    the others.
    """


# --- running an instance -------------------------------------------------------------------------


@cli.command(
    cls=_ServeCommand,
    options_metavar="[OPTIONS]",
    examples="""
    watchkeeper serve ./tiny-model
    watchkeeper serve Qwen/Qwen3-0.6B --component policy -- --max-model-len 4096
    watchkeeper serve any-name --engine sim -- --token-interval-ms 20
    """,
)
@click.argument("model", required=False)
@_declare(settings.SERVE_OPTIONS)
@click.option(
    "--print-termination-grace",
    is_flag=True,
    help="Print the terminationGracePeriodSeconds that a pod with these options needs, and exit.",
)
@click.pass_context
def serve(
    context: click.Context,
    /,
    model: str | None,
    config: str | None,
    print_termination_grace: bool,
    **flags: Any,
) -> int:
    """Run one instance with one engine.

    MODEL is a directory or a hub name. Arguments after -- go to the engine untouched.

    Exit codes: 0 orderly shutdown, 1 the engine failed, 2 wrong usage, configuration or
    surroundings, 70 a second signal cut the shutdown short.
    """
    if model is None:
        if not print_termination_grace:
            raise click.UsageError("MODEL is missing: a model directory or a hub name", context)
        model, flags["engine"] = "any", "sim"
    loaded = settings.load_serve(model, context.obj, flags, config=config)
    if print_termination_grace:
        click.echo(loaded.termination_grace_s)
        return 0
    from service import worker

    return worker.run(loaded)


@cli.command(
    cls=_Command,
    examples="""
    watchkeeper router
    watchkeeper router --policy pd --http-address 0.0.0.0:8080 --migration-limit 3
    watchkeeper router --static aggregated=http://10.0.0.7:8000 --static aggregated=http://10.0.0.8:8000
    """,
)
@_declare(ROUTER_OPTIONS)
def router(config: str | None, **flags: Any) -> int:
    """Route OpenAI API requests to the instances of a component, only where they can be served.

    Instances come from discovery, and from --static. Run several for more throughput.

    Exit codes: 0 orderly shutdown, 2 wrong usage, configuration or surroundings, 70 a second signal
    cut the shutdown short.
    """
    from service.router.settings import load_router

    loaded = load_router(flags, config=config)
    from service.router import server

    return server.run(loaded)


@cli.command(
    name="router-status",
    cls=_Command,
    examples="""
    watchkeeper router-status
    watchkeeper router-status http://10.0.0.5:8080 --admin-token-file token --json | jq .pools
    """,
)
@click.argument("url", default="http://127.0.0.1:8080")
@click.option("--admin-token-file", metavar="FILE", help="File with the bearer token that /state asks for.")
@click.option("--json", "as_json", is_flag=True, help="Print what the router answers.")
def router_status(url: str, admin_token_file: str | None, as_json: bool) -> int:
    """Show the pools of a router: who is in use, with what load, and why the others are not.

    Exit codes: 0 it answered, 2 it did not.
    """
    token = None
    if admin_token_file is not None:
        path = options.parse_value(options.SECRET_FILE, "--admin-token-file", admin_token_file)
        token = options.read_secret(path)
    from service.router import status

    return status.show((url if "://" in url else f"http://{url}").rstrip("/"), token, as_json)


_NOT_FOR_A_FLEET = {
    "engine",
    "instance",
    "http_address",
    "admin_address",
    "admin_token_file",
    "ready_file",
    "data_dir",
}


@cli.command(
    name="sim-fleet",
    cls=_ServeCommand,
    options_metavar="[OPTIONS]",
    examples="""
    watchkeeper sim-fleet 100 --component policy
    watchkeeper sim-fleet 3 --prefix decode --role decode -- --call-ms pause=50
    """,
)
@click.argument("count", type=click.IntRange(1, 5000), metavar="N")
@_declare([option for option in settings.SERVE_OPTIONS if option.name not in _NOT_FOR_A_FLEET])
@click.option("--prefix", default="sim", show_default=True, help="Names are PREFIX-0001 and so on.")
@click.pass_context
def sim_fleet(context: click.Context, /, count: int, prefix: str, config: str | None, **flags: Any) -> int:
    """Run N simulated instances in one process, until a signal.

    Each has its own bus connection, and health names of its own on the one gRPC listener:
    PREFIX-0001/readiness and so on. They take every command, and no inference requests.
    Arguments after -- go to the simulated engines.
    """
    from service import sim_fleet as fleet

    made = [
        settings.load_serve(
            "sim-model",
            context.obj,
            {**flags, "engine": "sim", "instance": f"{prefix}-{number:04d}"},
            config=config,
        )
        for number in range(1, count + 1)
    ]
    return fleet.run(made)


@cli.command(
    name="tiny-model",
    cls=_Command,
    examples="watchkeeper tiny-model ./tiny-model && watchkeeper serve ./tiny-model",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="Other seeds give other weights.")
def tiny_model(directory: Path, seed: int) -> None:
    """Write a small random model, with tokenizer and chat template, to DIRECTORY."""
    from service.engine.tiny_model import write_tiny_model

    try:
        write_tiny_model(directory, seed)
    except OSError as error:
        raise SettingsError(f"cannot write to {str(directory)!r}: {error.strerror}") from error


# --- looking at instances ------------------------------------------------------------------------


@cli.command(
    cls=_Command,
    examples="""
    watchkeeper probe 127.0.0.1:50051 readiness
    watchkeeper probe [::1]:50051
    """,
)
@click.argument("address", metavar="HOST:PORT")
@click.argument("service", default="")
@click.option("--connect-timeout-s", default="1", show_default=True, metavar="SECONDS")
@click.option("--rpc-timeout-s", default="1", show_default=True, metavar="SECONDS")
def probe(address: str, service: str, connect_timeout_s: str, rpc_timeout_s: str) -> int:
    """Make one gRPC health check on a new connection.

    SERVICE is liveness, readiness, vllm.Inference, vllm.Control or, by default, the empty name.

    Exit codes: 0 SERVING, 4 any other status, 3 the check failed, 2 could not connect.
    """
    try:
        target = options.Address.parse(address)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    limits = [
        options.parse_value(options.POSITIVE_SECONDS, flag, text)
        for flag, text in (("--connect-timeout-s", connect_timeout_s), ("--rpc-timeout-s", rpc_timeout_s))
    ]
    import asyncio

    from service.probe import Outcome, probe

    found = asyncio.run(probe(target, service, *limits))
    if found.outcome in (Outcome.SERVING, Outcome.NOT_SERVING):
        click.echo(found.text)
    else:
        _complain(found.text)
    return int(found.outcome)


@cli.command(
    cls=_Command,
    examples="""
    watchkeeper events --component policy
    watchkeeper events | jq -r '[.instance, .state, .weights.version] | @tsv'
    """,
)
@_declare(settings.CLIENT_OPTIONS)
def events(config: str | None, **flags: Any) -> int:
    """Print each state event of a component as one line of JSON, until interrupted."""
    loaded = settings.load_client(flags, config=config)
    from service import commands

    return commands.print_events(loaded)


@cli.command(
    cls=_Command,
    examples="""
    watchkeeper watch
    watchkeeper watch --component policy --once
    """,
)
@click.option("--once", is_flag=True, help="Print the table and exit.")
@_declare(settings.CLIENT_OPTIONS)
def watch(once: bool, config: str | None, **flags: Any) -> int:
    """Show all instances of a component as a live table.

    It is redrawn at each state event until interrupted. Without a terminal each change is a line.

    Exit codes: 0 interrupted, or with --once all went well, 2 wrong usage or no broker.
    """
    loaded = settings.load_client(flags, config=config)
    from service import watch as watching

    return watching.watch(loaded, once)


# --- commands to instances -----------------------------------------------------------------------

_MODES = click.Choice(("abort", "wait", "keep"))
_MODE_HELP = "What happens to requests in flight: abort ends them, wait lets them finish, keep freezes them."


class _JsonParameter(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """JSON, or `@FILE` with JSON in it."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        import json

        try:
            text = Path(value[1:]).read_text() if value.startswith("@") else value
            return json.loads(text)
        except OSError as error:
            self.fail(f"cannot read {value[1:]!r}: {error.strerror}", param, ctx)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


_JSON = _JsonParameter()


def _verb(
    examples: str = "", required: bool = True
) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
    """Make a command that sends its own name as a verb; the function gives the args.

    Args:
        required: whether `--instance` or `--all` must be said.
    """

    def decorate(make_args: Callable[..., dict[str, Any]]) -> click.Command:
        verb = make_args.__name__
        declared: list[click.Parameter] = getattr(make_args, "__click_params__", [])
        own = {parameter.name for parameter in declared}

        def command(**given: Any) -> int:
            args = make_args(**{name: given.pop(name) for name in own})
            return _send(verb, args, required, **given)

        for option in reversed(_target_options(own_id="id" in own)):
            command = option(command)
        command.__click_params__ += declared  # type: ignore[attr-defined]
        return cli.command(
            name=verb.replace("_", "-"),
            cls=_Command,
            help=f"{make_args.__doc__}\n\n{_EXIT_CODES}",
            examples=examples,
        )(command)

    return decorate


_EXIT_CODES = (
    "Exit codes: 0 all ok, 1 some refused or failed, 3 some did not answer, 2 wrong usage or no broker."
)


def _send(
    verb: str,
    args: dict[str, Any],
    required: bool,
    instance: tuple[str, ...],
    everyone: bool,
    as_json: bool,
    wait_s: str,
    issuer: str | None,
    epoch: int | None,
    session: str | None,
    config: str | None,
    command_id: str | None = None,
    **broker: Any,
) -> int:
    if instance and everyone:
        raise click.UsageError("--instance and --all exclude each other")
    if not instance and not everyone and required:
        raise click.UsageError("say --instance ID or --all")
    loaded = settings.load_client(broker, config=config)
    wait = options.parse_value(options.POSITIVE_SECONDS, "--wait-s", wait_s)
    names = dict.fromkeys(options.parse_value(options.NAME, "--instance", each) for each in instance)
    from service import commands

    order = commands.Order(
        verb=verb,
        args={key: value for key, value in args.items() if value is not None},
        instances=tuple(names) or None,
        id=command_id,
        issuer=issuer,
        epoch=epoch,
        session=session,
    )
    return commands.send(loaded, order, wait, as_json)


def _target_options(own_id: bool) -> list[Callable[[Any], Any]]:
    """What every verb takes. `own_id`: the verb has an `--id` of its own."""
    return [
        click.option("--instance", metavar="ID", multiple=True, help="Instance to send it to; repeatable."),
        click.option("--all", "everyone", is_flag=True, help="Send it to all instances of the component."),
        click.option("--json", "as_json", is_flag=True, help="Print the replies, one JSON object on a line."),
        click.option(
            "--wait-s",
            default="30",
            show_default=True,
            metavar="SECONDS",
            help="How long to wait for replies; the command is not started after that.",
        ),
        *(
            []
            if own_id
            else [
                click.option(
                    "--id", "command_id", metavar="ID", help="Idempotency key: a repeat gets the first reply."
                )
            ]
        ),
        click.option(
            "--session", metavar="ID", help="Weight-update session, as start-weight-update returned it."
        ),
        click.option(
            "--epoch", type=int, help="Trainer epoch; a lower one than the highest seen is refused."
        ),
        click.option("--issuer", metavar="TEXT", help="Who asks, for events and logs.  [default: user@host]"),
        _declare(settings.CLIENT_OPTIONS),
    ]


_lease = click.option(
    "--lease-s", type=float, metavar="SECONDS", help="It ends by itself unless renewed within this time."
)


@_verb("watchkeeper pause --all --mode keep")
@click.option("--mode", type=_MODES, help=f"{_MODE_HELP}  [default: abort]")
@click.option("--no-clear-cache", is_flag=True, help="Keep the prefix cache.")
@_lease
def pause(mode: str | None, no_clear_cache: bool, lease_s: float | None) -> dict[str, Any]:
    """Stop scheduling, and withdraw readiness."""
    return {"mode": mode, "clear_cache": False if no_clear_cache else None, "lease_s": lease_s}


@_verb("watchkeeper resume --all")
def resume() -> dict[str, Any]:
    """End every pause."""
    return {}


@_verb("watchkeeper sleep --instance node-7-1a2b3c --level 2")
@click.option(
    "--level",
    type=click.IntRange(0, 2),
    help="0 only stops scheduling, 1 keeps the weights in host memory, 2 discards them.  [default: 1]",
)
@click.option("--mode", type=_MODES, help=f"{_MODE_HELP}  [default: abort]")
def sleep(level: int | None, mode: str | None) -> dict[str, Any]:
    """Release accelerator memory."""
    return {"level": level, "mode": mode}


@_verb("watchkeeper wake-up --all --tag weights")
@click.option(
    "--tag",
    "tags",
    type=click.Choice(("weights", "kv_cache", "scheduling")),
    multiple=True,
    help="What to wake; repeatable.  [default: all]",
)
def wake_up(tags: tuple[str, ...]) -> dict[str, Any]:
    """Make memory resident again; scheduling resumes once all of it is."""
    return {"tags": list(tags) or None}


@_verb("watchkeeper init-weight-transfer --all --init-info '{}'")
@click.option("--init-info", type=_JSON, default="{}", show_default=True, help="As the backend wants it.")
def init_weight_transfer(init_info: Any) -> dict[str, Any]:
    """Prepare the weight-transfer backend."""
    return {"init_info": init_info}


@_verb("watchkeeper start-weight-update --all --pause-mode keep")
@click.option("--pause-mode", type=_MODES, help=f"{_MODE_HELP}  [default: keep]")
@_lease
@click.option(
    "--manifest", type=_JSON, help="What must have arrived at the finish: {parameters, names_sha256, chunks}."
)
def start_weight_update(pause_mode: str | None, lease_s: float | None, manifest: Any) -> dict[str, Any]:
    """Open a weight-update session."""
    return {"pause_mode": pause_mode, "lease_s": lease_s, "manifest": manifest}


@_verb(
    """
    watchkeeper update-weights --all --path /models/step-200
    watchkeeper update-weights --all --update-info @chunk.json
    """
)
@click.option("--update-info", type=_JSON, help="One chunk, as the backend wants it.")
@click.option(
    "--path", help="Short for the file backend's {path}: safetensors, a file or a directory of them."
)
def update_weights(update_info: Any, path: str | None) -> dict[str, Any]:
    """Load one chunk of weights in an open session."""
    if (update_info is None) == (path is None):
        raise click.UsageError("say either --update-info JSON or --path PATH")
    return {"update_info": {"path": os.path.abspath(path)} if path is not None else update_info}


@_verb("watchkeeper finish-weight-update --all --weight-version step-200")
@click.option(
    "--weight-version", help="What the weights are called from now on.  [default: the session's id]"
)
@click.option(
    "--cache",
    type=click.Choice(("clear", "keep")),
    help="What becomes of the prefix cache.  [default: clear]",
)
@click.option(
    "--allow-empty",
    is_flag=True,
    default=None,
    help="Commit although no chunk was sent: the weights came another way.",
)
def finish_weight_update(
    weight_version: str | None, cache: str | None, allow_empty: bool | None
) -> dict[str, Any]:
    """Commit the session's weights, and go back to where it was."""
    return {"weight_version": weight_version, "cache": cache, "allow_empty": allow_empty}


@_verb("watchkeeper abort-weight-update --all")
def abort_weight_update() -> dict[str, Any]:
    """Give the session up: undone if nothing was loaded, else the weights count as tainted."""
    return {}


class _EpochParameter(click.ParamType):  # type: ignore[type-arg]  # generic only in newer click
    """A number, or `new`."""

    name = "N|new"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "new" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'new'", param, ctx)


@cli.command(
    cls=_Command,
    examples="""
    watchkeeper announce --version step-200 --path /models/step-200
    watchkeeper announce --version step-200 --update-info @chunk.json --epoch new
    """,
)
@click.option("--version", "version_", required=True, help="What the weights are called from now on.")
@click.option(
    "--update-info", type=_JSON, multiple=True, help="One chunk, as the backend wants it; repeatable."
)
@click.option(
    "--path",
    multiple=True,
    help="Short for the file backend's {path}: safetensors, a file or a directory of them; repeatable.",
)
@click.option(
    "--epoch",
    type=_EpochParameter(),
    help="Trainer epoch; 'new' takes one above all others.  [default: the highest so far]",
)
@click.option("--init-info", type=_JSON, help="Prepares the backend first, if given.")
@click.option("--pause-mode", type=_MODES, help=f"{_MODE_HELP}  [default: keep]")
@click.option(
    "--cache",
    type=click.Choice(("clear", "keep")),
    help="What becomes of the prefix cache.  [default: clear]",
)
@click.option("--manifest", type=_JSON, help="What must have arrived: {parameters, names_sha256, chunks}.")
@_lease
@click.option("--id", metavar="ID", help="Of the announcement, for events and logs.  [default: a new one]")
@click.option("--issuer", metavar="TEXT", help="Who announces, for events and logs.  [default: user@host]")
@_declare(settings.CLIENT_OPTIONS)
def announce(
    version_: str,
    update_info: tuple[Any, ...],
    path: tuple[str, ...],
    epoch: int | str | None,
    init_info: Any,
    pause_mode: str | None,
    cache: str | None,
    manifest: Any,
    lease_s: float | None,
    id: str | None,
    issuer: str | None,
    config: str | None,
    **broker: Any,
) -> int:
    """Announce a weight version to all instances of a component.

    Each applies it by itself, also one that starts later. See with watch when they have it.

    Exit codes: 0 announced, 2 wrong usage or no broker.
    """
    if bool(update_info) == bool(path):
        raise click.UsageError("say either --update-info JSON or --path PATH")
    loaded = settings.load_client(broker, config=config)
    from service import commands

    given = {
        "version": version_,
        "updates": [{"path": os.path.abspath(each)} for each in path] or list(update_info),
        "epoch": None if epoch == "new" else epoch,
        "init_info": init_info,
        "pause_mode": pause_mode,
        "cache": cache,
        "manifest": manifest,
        "lease_s": lease_s,
        "id": id,
        "issuer": issuer,
    }
    announcement = {key: value for key, value in given.items() if value is not None}
    return commands.announce(loaded, announcement, epoch == "new")


@_verb(
    """
    watchkeeper status
    watchkeeper status --instance node-7-1a2b3c --verb pause --id my-key
    """,
    required=False,
)
@click.option("--verb", help="With --id: the remembered reply of that command.")
@click.option("--id", metavar="ID", help="The idempotency key of that command.")
def status(verb: str | None, id: str | None) -> dict[str, Any]:
    """Show the state of instances; of all, unless --instance is given."""
    if (verb is None) != (id is None):
        raise click.UsageError("--verb and --id go together")
    return {"verb": verb.replace("-", "_") if verb else None, "id": id}


@_verb("watchkeeper shutdown --instance node-7-1a2b3c")
def shutdown() -> dict[str, Any]:
    """End instances in good order."""
    return {}


if __name__ == "__main__":
    main()
