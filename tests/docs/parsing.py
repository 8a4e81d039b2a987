"""A command line read by the parser of its command, and no further."""

import argparse
from typing import Any
from unittest import mock

from classes import STAND_INS

from megajax.cli import main
from megajax.settings.flags import Parser
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_imagined


class _Read(BaseException):
    """A command's parser has read its command line."""


def read(words: list[str]) -> None:
    """Let `megajax WORDS...` read its command line; of presets the configuration on its mesh is checked, too. A run's
    config.toml, which is not there, is the preset that `classes.py` says.

    Raises:
        UserError: what the command would say.
    """
    words = [STAND_INS.get(word, "demo") if word.endswith("/config.toml") else word for word in words]
    parse = Parser.parse_args

    def parse_and_leave(self: Parser, *arguments: Any) -> argparse.Namespace:
        args = parse(self, *arguments)
        if hasattr(args, "preset"):
            validate_imagined(resolve(load_preset(args.preset), self.overrides(args)))
        raise _Read

    with mock.patch.object(Parser, "parse_args", parse_and_leave):
        try:
            main(words)
        except _Read:
            return
        except SystemExit as end:  # --help, --version
            assert not end.code
            return
    raise AssertionError(f"{words}: did not ask its parser")
