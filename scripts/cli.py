"""The `eyas` command: one verb per file, parse and call.

Errors of the user are one sentence and exit code 2, failed checks one and exit code 1.
"""

import logging
import sys

import typer

from eyas.models.errors import CheckFailed, UserError
from eyas.scripts import (
    calibrate,
    chat,
    compare,
    doctor,
    export,
    generate,
    import_head,
    plan,
    preview,
    push,
    run,
    verify_engine,
)
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
app.command("preview")(preview.preview)
add_stage_verbs(app)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("export")(export.export)
app.command("import")(import_head.import_verb)
app.command("doctor")(doctor.doctor)
app.command("push")(push.push)
app.command("calibrate")(calibrate.calibrate)
app.command("verify-engine")(verify_engine.verify_engine)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
add_bench_verbs(app)


def main() -> None:
    """Run the command line."""
    for chatty in ("torchao", "torch.utils._pytree"):  # on import they tell every user which GPU libraries are missing
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        app(prog_name="eyas")
    except (UserError, CheckFailed, FloatingPointError) as error:
        from eyas.train.progress import Reporter

        Reporter().error(str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)
    except StoppedBySignal as stopped:
        from eyas.train.progress import Reporter

        Reporter().say(str(stopped))
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
