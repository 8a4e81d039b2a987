"""What stands in the sources: modules whose import takes seconds in few places, and in every error what is valid."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxequal
import megajax
from megajax.__main__ import COMMANDS
from megajax.commands.convert import ACTIONS

PACKAGE = Path(megajax.__file__).parent
SOURCES = sorted(file for each in (megajax, jaxequal) for file in Path(each.__file__).parent.rglob("*.py"))
NAMES = "core.options core.errors core.pipeline.schedule core.pipeline.timing settings.presets settings.flags"
NAMES += " settings.validation __main__ commands data.text.corpus data.samples.loader"


def test_configuration_and_data_need_no_jax() -> None:
    """Nor Grain, which imports JAX, and the tokenizer library; data uses these two where they are needed. The command
    line and its errors come before JAX, which takes seconds to start."""
    sections = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("config.py")]
    given = ["generation.generate_options", "preparation.prepare_options"]
    assert {"core.config", "core.models.config", "core.pipeline.config", "data.config"} <= set(sections)
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'megajax.{name}')\n"
        "    heavy = [heavy for heavy in ('jax', 'jaxlib', 'grain', 'tokenizers') if heavy in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
        "print(json.dumps(len(sys.argv) - 1))"
    )
    names = [*NAMES.split(), *sections, *given]
    found = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == len(names)


HEAVY = "jax jaxlib flax optax orbax matplotlib grain tokenizers pyarrow tensorstore rich"
HELPS = ["", *COMMANDS, "train demo", "plan demo", "verify demo", *(f"convert {action}" for action in ACTIONS)]


def test_no_help_needs_more_than_the_configuration() -> None:
    """Nor does the refusal of a mesh. Of all commands in one process, where nothing that takes long to import may be
    imported afterwards."""
    script = (
        "import contextlib, io, json, sys\n"
        "from megajax.__main__ import main\n"
        "for line in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        main([*line.split(), '--help'])\n"
        "    assert 'usage: megajax' in out.getvalue(), line\n"
        f"    heavy = [name for name in {HEAVY!r}.split() if name in sys.modules]\n"
        "    assert not heavy, (line, heavy)\n"
        "    light = 'numpy' not in sys.modules\n"
        "    assert light or line, 'megajax --help'\n"
        "for words in 'train demo', *(f'{command} --checkpoint x' for command in ('generate', 'eval mnli')):\n"
        "    try:\n"
        "        main([*words.split(), '--mesh.data', '8', '--simulate-devices', '2'])\n"
        "    except ValueError as error:\n"
        "        assert 'needs 8 devices, but there are 2' in str(error), error\n"
        "assert 'jax' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", script, *HELPS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_exact_comparison_is_a_package_of_its_own() -> None:
    """Its errors end a command as ours do: they are the same."""
    assert all(getattr(megajax.exact, name) is getattr(jaxequal, name) for name in megajax.exact.__all__)
    assert (megajax.UserError, megajax.RunError) == (jaxequal.UserError, jaxequal.RunError)


def test_private_names_stand_in_one_module() -> None:
    """Those of JAX and Orbax, each with the public way that is hoped for; in one of each package."""
    found = {
        str(file.relative_to(PACKAGE.parent)) for file in SOURCES if re.search(r'\._src|params\["_', file.read_text())
    }
    assert found == {"megajax/core/private.py", "jaxequal/private.py"}


ELSEWHERE = {  # pieces of messages that say it in a variable
    "advice}",
    "_ADVICE}",
    "_VALID}",
    "near}",  # megajax/settings/flags.py and presets.py: the nearest names
    "option.flag} {problem}",  # megajax/core/options.py: `Option.problem`
    "name} {reason}",  # megajax/settings/flags.py: what `_Value` says
    "where}: {error}",  # megajax/settings/presets.py: what is wrong with a base
    "path}: {error}",  # megajax/host/reading.py: of `TooLong`
    "flag}: {file}: {error}",  # megajax/data/text/records.py, megajax/data/tasks/sources.py: of `reading.TooLong`
    "its standard error says why",
    "UserError(value)",  # megajax/host/limited.py: that of the function
}


def messages() -> Iterator[tuple[str, str]]:
    """The place and the source of the argument of every `UserError(…)`."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
                yield f"{file.relative_to(PACKAGE.parent)}:{node.lineno}", ast.unparse(node)


def test_what_would_be_valid_is_said() -> None:
    found = dict(messages())
    silent = [
        f"{place}: {message}"
        for place, message in found.items()
        if "valid" not in message and not any(piece in message for piece in ELSEWHERE)
    ]
    assert len(found) > 150 and not silent, "\n".join(silent)
