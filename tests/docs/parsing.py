"""A command line read by the parser of its command, and no further."""

import argparse
import re
from typing import Any
from unittest import mock

from megajax.cli import main
from megajax.flags import Parser
from megajax.presets import load_preset, resolve
from megajax.validation import validate_imagined


class _Read(BaseException):
    """A command's parser has read its command line."""


def read(words: list[str]) -> None:
    """Let `megajax WORDS...` read its command line; of presets the configuration on its mesh is checked, too. A preset
    of a run that is not there counts as the one it was made of, or as one of ours.

    Raises:
        UserError: what the command would say.
    """
    words = ["demo" if re.fullmatch(r"runs/(stable|decay)/config\.toml", word) else word for word in words]
    words = ["gpt2-355m" if re.fullmatch(r"(runs/\S+|RUN)/config\.toml", word) else word for word in words]
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
