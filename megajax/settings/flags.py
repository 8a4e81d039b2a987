"""A flag for every field of the configuration, and a parser whose errors are one line."""

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

from megajax.core.axes import AXES
from megajax.core.errors import UserError
from megajax.core.options import Option, options, sections, suggest
from megajax.host import completion
from megajax.host.paths import apart
from megajax.host.reading import parse_toml
from megajax.host.transcript import tell
from megajax.settings.config import Config
from megajax.settings.option_errors import shown
from megajax.settings.other_names import nearest
from megajax.settings.plugins import load_plugins, plugins_in
from megajax.settings.preset_files import names_in_folders, preset_names
from megajax.settings.presets import Preset, load_preset, read_preset, resolve

# What people set, with which `--help` begins.
COMMON = (
    "run_dir data.path tokenizer.path init precision seed resume sequence_parallel mesh.data mesh.expert mesh.pipe "
    "mesh.context mesh.tensor pipeline.schedule pipeline.chunks pipeline.weight_gradients train.steps "
    "train.global_batch train.microbatch train.remat train.eval_every optimizer.name optimizer.learning_rate "
    "optimizer.warmup_steps optimizer.schedule optimizer.zero checkpoint.every track plugins simulate_devices"
)
MESH_FLAGS = " ".join(f"[--mesh.{axis} N]" for axis in AXES)  # for usage lines


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UserError`, accepts no abbreviations, and knows the configuration's flags. In
    the namespace a flag is named by its key (`mesh.data`), and exists only if it was given."""

    def __init__(self, description: str, usage: str) -> None:
        width = max(100, min(130, shutil.get_terminal_size((120, 24)).columns))
        formatter = partial(argparse.HelpFormatter, max_help_position=42, width=width)
        super().__init__(description=description, usage=usage, allow_abbrev=False, formatter_class=formatter)
        self._keys: dict[type, list[str]] = {}  # keys of the configuration flags, by dataclass
        self._sections: dict[str, argparse._ArgumentGroup] = {}  # of the configuration, by name

    def add_path(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument that is one or more paths; a leading `~` means the home folder."""
        return self.add_argument(*names, type=os.path.expanduser, **settings)

    def add_preset(self, argv: Sequence[str]) -> dict[str, Any]:
        """Add the argument PRESET. If `argv` has `--help`, returns the values of the preset named first. Presets may be
        remote, so this reads one only then."""
        names, inner = preset_names(), names_in_folders()
        folders = sorted({f"{name.partition('/')[0]}/NAME" for name in inner})
        valid = f"a TOML file, or one of {', '.join([*names, *folders])}"
        preset = self.add_path("preset", metavar="PRESET", help=valid)
        completion.offer(preset, lambda: [*names, *inner], files=("toml",))
        asks = any(word == "--help" or word.startswith("-h") for word in argv)
        return load_preset(os.path.expanduser(argv[0])) if asks and not argv[0].startswith("-") else {}

    def add_config_flags(self, *names: str, owner: type = Config, values: Mapping[str, Any] | None = None) -> None:
        """Add flags for fields of the configuration, or of another dataclass `owner`: the sections or fields in
        `names`, by default all. `--help` shows the defaults in `values`, by key."""
        groups = {}
        for key, option in options(owner).items():
            section = key.rpartition(".")[0]
            if names and section not in names and key not in names:
                continue
            if section not in groups:
                title = sections(owner)[section].__doc__ if section else owner.__doc__
                groups[section] = self.add_argument_group((title or section).splitlines()[0].rstrip("."))
                if section:
                    self._sections[section.replace("_", "-")] = groups[section]
            add_flag(groups[section], option, (values or {}).get(key, option.default))
            self._keys.setdefault(owner, []).append(key)

    def add_weights(self) -> None:
        """Add `--weights`, which can override `train.ema` of the run's configuration."""
        what = "for a run with train.ema: the averaged weights, or the latest ones"
        self.add_argument("--weights", choices=("ema", "trained"), default="ema", help=f"{what} [ema]")

    def parse_args(self, argv: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments, like `argparse`."""
        if completion.asked():
            completion.answer(self)
        for word in argv or ():
            if "\0" in word:
                raise UserError(f"{shown(word)}; valid: arguments without NUL")
        argv = None if argv is None else [self._with_hyphens(word) for word in argv]
        load_plugins(plugins_in(argv or ()))
        for word, section in pairwise([*(argv or ()), "-"]):
            if word in ("-h", "--help") and self._sections:
                self._common_first() if section.startswith("-") else self._only(section)
        args, unknown = self.parse_known_args(argv, namespace)
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-") and word != "-"]
        if flags:
            near = nearest(flags[0], self._option_string_actions, "valid: the flags in --help")
            raise UserError(f"{flags[0]}: unknown flag; {near}")
        if unknown:
            raise UserError(f"{unknown[0]!r} is an unexpected argument; valid: {self.usage}")
        return args

    def _with_hyphens(self, word: str) -> str:
        """An argument whose flag is known with hyphens in place of its underscores is that flag."""
        name, *value = word.split("=", 1)
        known = name.startswith("--") and (flag := name.replace("_", "-")) in self._option_string_actions
        return "=".join([flag, *value]) if known else word

    def _only(self, section: str) -> None:
        """Have `--help` show one section's flags."""
        if section not in self._sections:
            valid = f"valid: {', '.join(self._sections)}"
            raise UserError(f"--help {section}; {suggest(section, self._sections, valid)}")
        self._action_groups = [self._sections[section]]
        self.description = None

    def _common_first(self) -> None:
        """Have `--help` name the sections in its second line, and begin with the most common of all flags."""
        self.usage = f"{self.usage}\n       --help SECTION shows one section: {', '.join(self._sections)}"
        common, actions = COMMON.split(), {action.dest: action for action in self._actions}
        if actions.keys() >= {*common}:
            first = self.add_argument_group("What is set most often")
            for group in self._action_groups:
                group._group_actions = [each for each in group._group_actions if each.dest not in common]
            first._group_actions = [actions[key] for key in common]
            self._action_groups.insert(2, self._action_groups.pop())

    def error(self, message: str) -> NoReturn:
        """Raise `argparse`'s error as a `UserError` that says what would be valid."""
        name, _, reason = message.removeprefix("argument ").partition(": ")
        positionals = {action.metavar: action for action in self._get_positional_actions()}
        if name == "the following arguments are required":
            raise UserError(
                f"{reason} missing; valid: {positionals[reason].help if reason in positionals else self.usage}"
            )
        action = (positionals | self._option_string_actions).get(name.partition("/")[0])
        if action is None:
            raise UserError(f"{message}; valid: {self.usage}")
        if action.choices and reason.startswith("invalid choice: "):
            given = reason.removeprefix("invalid choice: ").partition(" (choose from")[0]
            near = suggest(given.strip("'"), map(str, action.choices), "")
            raise UserError(f"{name} {given}; {near}{' ' * bool(near)}valid: {', '.join(action.choices)}")
        if reason.startswith("expected "):
            valid = action.type.args[0].valid if isinstance(action.type, partial) else action.help
            raise UserError(f"{name} needs a value; valid: {valid}")
        if reason.startswith("ignored explicit argument"):
            raise UserError(f"{name} takes no value; valid: {' or '.join(action.option_strings)}")
        raise UserError(f"{name} {reason}")

    def overrides(self, args: argparse.Namespace, owner: type | None = None) -> dict[str, Any]:
        """The values of the given configuration flags by key, for one dataclass or all."""
        owners = self._keys if owner is None else [owner]
        given = {key: getattr(args, key) for found in owners for key in self._keys[found] if hasattr(args, key)}
        trained = owner in (None, Config) and getattr(args, "weights", "") == "trained"
        return given | ({"train.ema": 0.0} if trained else {})


def parsed(option: Option, text: str) -> Any:
    """A flag's text as the option's type; records are TOML. Raises `ValueError` if it is not valid."""
    return option.convert(parse_toml(f"value = {text}")["value"]) if option.record else option.parse(text)


def _value(option: Option, text: str) -> Any:
    """The value of a flag's text; used as argparse's `type`."""
    try:
        value = parsed(option, text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)}; valid: {option.valid}") from None
    if problem := option.problem(value):
        several = apart(text, lambda part: not option.problem(option.parse(part))) if option.is_list else ""
        raise argparse.ArgumentTypeError(problem + several)
    return value


def add_flag(group: Any, option: Option, default: Any = None, required: bool = False) -> None:
    """Add an option's flag to a parser or group; `--help` shows `default`, or otherwise the option's own default."""
    default = option.default if default is None else default
    text, _, meaning = (option.help if default == "" else "").partition("; empty: ")
    words = "required" if required else meaning or in_words(default)
    settings: dict[str, Any] = {
        "dest": option.key,
        "default": argparse.SUPPRESS,
        "help": f"{text if meaning else option.help} [{words}]".replace("%", "%%"),
    }
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    metavar = {int: "N", float: "X"}.get(option.kind, "TOML" if option.record else "TEXT")
    if option.choices:  # where only plugins have names, there are none yet
        metavar = "{" + ",".join(map(str, option.choices)) + "}" if any(option.choices) else "NAME"
    settings |= {"type": partial(_value, option), "metavar": metavar, "nargs": "+" if option.is_list else None}
    flag = group.add_argument(option.flag, required=required, **settings)
    if metavar != "TEXT":  # texts may be paths, which the shell completes
        completion.offer(flag, lambda: map(str, option.choices))


def in_words(default: Any) -> str:
    """A default value, as `--help` shows it: as one would write it on the command line."""
    named = {MISSING: "set by the preset", "": "none", (): "none", True: "on", False: "off"}
    if isinstance(default, bool | str | tuple) or default is MISSING:
        texts = default if isinstance(default, tuple) and all(isinstance(each, str) for each in default) else ()
        return named.get(default) or " ".join(texts) or str(default)
    return str(default).removesuffix(".0")


@dataclass(frozen=True)
class Given:
    """A parsed command line `PRESET [--flag value ...]`."""

    preset: Preset  # the preset it names
    overrides: dict[str, Any]  # the values of its flags, by key
    print_config: bool  # print the configuration instead of training
    dry_run: bool  # do everything up to the first step instead of training

    def config(self, *, decay_follows: bool = True) -> Config:
        """The configuration; see `resolve`."""
        return resolve(self.preset.values, self.overrides, decay_follows=decay_follows)


def read_command(argv: Sequence[str], description: str, prog: str) -> Given:
    """Parse a command line `PRESET [--flag value ...]`. With `--help` this prints all flags, with the defaults of the
    preset if one is named first, and exits with code 0."""
    parser = Parser(description, f"{prog} PRESET [--flag value ...]")
    values = parser.add_preset(argv)
    printing = "print the resolved configuration as a preset, with the origin of every value, and exit"
    parser.add_argument("--print-config", action="store_true", help=printing)
    trying = "check everything, read the data, plan memory and compile, but train nothing and keep no files"
    parser.add_argument("--dry-run", action="store_true", help=trying)
    parser.add_config_flags(values=values)
    args = parser.parse_args(argv)
    overrides = parser.overrides(args)
    if not overrides.get("run_dir", "."):
        del overrides["run_dir"]  # empty: use the preset's
    preset = read_preset(args.preset, overrides.get("run_dir", ""))
    return Given(preset, overrides, args.print_config, args.dry_run)


def parse(argv: Sequence[str], description: str, prog: str = "train.py") -> Config:
    """The configuration of a command line `PRESET [--flag value ...]`; see `read_command`."""
    return read_command(argv, description, prog).config()


def print_left_out(command: Given, config: Config) -> None:
    """Print which values of a run's configuration are not used, by a copy of it or by any start."""
    preset, left_out = command.preset, command.preset.left_out
    unused = []
    if left_out.get("run_dir") and "run_dir" not in command.overrides:
        unused.append(f"{config.run_dir} is used instead of its run_dir {left_out['run_dir']}")
    if left_out.get("simulate_devices") and "simulate_devices" not in command.overrides:
        unused.append(f"its --simulate-devices {left_out['simulate_devices']} is not used")
    of_start = [f"{key} = {shown(value)}" for key, value in preset.of_start.items() if key not in command.overrides]
    if config.distributed.process_id > 0:
        return
    if unused:
        tell(f"{preset.place} is the configuration of another run: {'; '.join(unused)}")
    if of_start:
        valid = "valid: as flags, or in a preset of your own"
        tell(f"{preset.place}: not taken over, since they belong to one start: {', '.join(of_start)}; {valid}")
