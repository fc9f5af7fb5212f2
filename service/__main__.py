"""The command line. Nothing heavy is imported before a command needs it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from service import settings
from service.settings import Option, SettingsError

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
            return int(cli.invoke(context) or 0)
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
    click.echo(f"watchkeeper: error: {' '.join(message.split())}", err=True)
    return USAGE


# --- how options are declared ------------------------------------------------------------------


def _declare(options: Sequence[Option]) -> Callable[[_F], _F]:
    """Make click options of ours. Values stay text: `service.settings` judges all sources alike."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = _click_option(option)(function)
        return click.option(
            "--config", metavar="FILE", help="TOML file; its keys are the names of the options."
        )(function)

    return decorate


def _click_option(option: Option) -> Callable[[_F], _F]:
    default = f"  [default: {option.shown_default}]" if option.shown_default else ""
    if option.kind is settings.BOOLEAN:
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
    """A command with examples, and a hint for what belongs to the engine."""

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
    """Keeps what comes after `--` away from our own parsing."""

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
        target = settings.Address.parse(address)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    limits = [
        settings.parse_value(settings.POSITIVE_SECONDS, flag, text)
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


if __name__ == "__main__":
    main()
