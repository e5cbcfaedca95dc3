"""The `eyas` command: one verb per file, parse and call. Errors of the user are one sentence and exit code 2."""

import sys

import typer

from eyas.models.errors import UserError
from eyas.scripts import chat, generate, run
from eyas.scripts.bench import add_bench_verbs
from eyas.scripts.stage import add_stage_verbs
from eyas.train.stop_signal import StoppedBySignal

app = typer.Typer(
    name="eyas",
    help="Train EAGLE draft heads for a frozen language model and prove what they win.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
add_stage_verbs(app)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
add_bench_verbs(app)


def main() -> None:
    """Run the command line."""
    try:
        app(prog_name="eyas")
    except UserError as error:
        from eyas.train.progress import Reporter

        Reporter().error(str(error))
        sys.exit(2)
    except FloatingPointError as error:
        from eyas.train.progress import Reporter

        Reporter().error(str(error))
        sys.exit(1)
    except StoppedBySignal as stopped:
        from eyas.train.progress import Reporter

        Reporter().say(str(stopped))
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
