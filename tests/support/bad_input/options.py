"""Bad values for the options of the command line, and the judge of what a command makes of one."""

import textwrap

import click
from click.testing import CliRunner

from autoaccum._cli.app import cli  # the command, in this process
from support.bad_input.engine import unclear

COUNTS = ["0", "-1", "2.5", "many", "9223372036854775808"]
LIMITS = ["lots", "0", "-5", "2 YiB", "150%", "9" * 400]
BELOW_A_FILE = ["a file/below"]
# By command and option; a text stands for one use of the option.
BAD = {
    "report": {
        "script": ["missing.py", "a file", "."],
        "target_batch": COUNTS,
        "target_tokens": COUNTS,
        "gpus": ["no such GPU", "", "a"],
        "device_memory": [*LIMITS[:4], "50%", "1MiB"],
        "display": ["much", "50%", "-1MiB"],
        "ranks": COUNTS[:4],
        "memory_limit": LIMITS,
        "save_memory": ["nope", "", "chunked_loss:head", "chunked_loss", "checkpoint:", "checkpoint:Blok", "auto:2"],
        "device": ["gpu", "cuda:99"],
        "precision": ["fp8"],
        "max_micro_batch": COUNTS,
        "require_micro_batch": COUNTS[:4],
        "require_free": ["lots", "50%", "0"],
        "html": BELOW_A_FILE,
    },
    "run": {
        "target_batch": COUNTS,
        "micro_batch": COUNTS,
        "world_size": COUNTS,
        "retries": ["-1", "some", "1.5"],
        "grace": ["-1", "nan", "soon"],
        "check": ["no", "2"],
    },
    "verify": {
        "target_batch": [*COUNTS, "1"],
        "micro_batch": COUNTS,
        "world_size": COUNTS,
        "steps": COUNTS,
        "timeout_s": ["0", "-1", "nan", "soon"],
    },
    "slurm": {
        "nodes": COUNTS[:4],
        "gpus": ["-1", "2.5", "many"],
        "cpus": ["2.5", "many"],
        "others": ["=3", "", "signal=USR2"],
        "warn_s": COUNTS[:4],
        "restarts": ["-1", "some"],
        "retries": ["-1", "some"],
        "target_batch": COUNTS,
        "micro_batch": COUNTS,
        "world_size": COUNTS,
    },
}
# Switches apart: what sbatch itself judges, and what is any text.
LEFT_OUT = {
    "report": {"arguments"},
    "run": {"command"},
    "verify": {"command"},
    "slurm": {"command", "time", "mem", "partition", "account", "array", "job_name", "preflight"},
}
SCRIPT = """
    import autoaccum, torch

    class Noting(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            open("trained", "w").close()

    batches = [(torch.randn(4, 4), torch.arange(4) % 3)]
    autoaccum.fit(torch.nn.Linear(4, 3), batches, 4, device="cpu", callbacks=[Noting()])
"""


def options():
    """Every option that takes a value, as (command, option, its name on the command line)."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        for parameter in cli.get_command(context, name).params:
            if not getattr(parameter, "is_flag", False) and parameter.name != "help":
                yield name, parameter.name, parameter.opts[0]


def missing():
    return [
        f"{command} {option}"
        for command, name, option in options()
        if name not in BAD.get(command, {}) and name not in LEFT_OUT.get(command, set())
    ]


def cases():
    """Every bad command line that is listed: command, option, its name there and the value."""
    return [
        (command, name, option, value)
        for command, name, option in options()
        for value in BAD.get(command, {}).get(name, ())
    ]


def judge(case, folder):
    """Run a bad command line in the working folder; return what is wrong with the answer, or "" where all is well."""
    command, name, option, value = case
    (folder / "a file").touch()
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    before = sorted(folder.rglob("*"))
    given = [value] if name == "script" else [f"{option}={value}"]
    script = [] if name == "script" or command != "report" else ["train.py"]
    endings = {
        "run": ["--no-cache", "--", "touch", "trained"],
        "slurm": ["--dry-run", "--", "true"],
        "verify": [*([] if name == "target_batch" else ["--target-batch", "4"]), "--", "touch", "{micro_batch}"],
    }
    ending = endings.get(command, [])
    answer = CliRunner().invoke(cli, [command, *script, *given, *ending])
    line = f"autoaccum {command} {' '.join(given)}"[:80]
    said = answer.stderr
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        return f"{line}: raw {type(answer.exception).__name__}: {answer.exception}"
    if answer.exit_code not in (2, 3, 7):
        return f"{line}: ended with {answer.exit_code}"
    words = {name, name.replace("_", "-"), option.lstrip("-")}
    if not any(word in said for word in words):
        return f"{line}: does not name {option}: {said}"
    if wrong := unclear(said.split("Error: ")[-1]):
        return f"{line}: {wrong}"
    left = [
        str(path.name) for path in sorted(folder.rglob("*")) if path not in before and "__pycache__" not in str(path)
    ]
    return f"{line}: left {', '.join(left)}" if left else ""
