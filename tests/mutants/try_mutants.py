"""`python tests/mutants/try_mutants.py [TEXT ...]` tries the mutants whose names have one of the texts, or all, after
their configurations without a mutant, and prints how each was caught and what was said of it; `--json FILE` keeps it.
"""

import argparse
import collections
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import PARTS
from mutant import Mutant
from trial import Outcome, import_what_is_slow, try_all


def trials(mutants: list[Mutant]) -> list[tuple]:
    """Of every configuration without a mutant, which must pass, and of every mutant."""
    unmutated = {str(mutant.options): mutant.options for mutant in mutants}
    return [
        *((f"none: {text}", None, options) for text, options in unmutated.items()),
        *((mutant.name, mutant, mutant.options) for mutant in mutants),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exactly", nargs="+", default=[], help="whole names")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help="without the configurations that have no mutant")
    parser.add_argument("--places", action="store_const", const="places", dest="form", help="where they are, too")
    parser.add_argument("--quick", action="store_const", const="quick", dest="form", help="by what should catch them")
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    names = arguments.names or [""]
    mutants = [mutant for part in arguments.parts for mutant in PARTS[part]]
    chosen = [mutant for mutant in mutants if any(name in mutant.name for name in names)]
    if arguments.exactly:
        chosen = [mutant for mutant in mutants if mutant.name in arguments.exactly]
    import_what_is_slow()
    outcomes: list[Outcome] = []
    ways = {mutant.name: mutant.way for mutant in chosen}
    with tempfile.TemporaryDirectory() as folder:
        todo = [trial for trial in trials(chosen) if not (arguments.bare and trial[1] is None)]
        for outcome in try_all(todo, arguments.cache or Path(folder), arguments.at_once, arguments.form or "check"):
            outcomes.append(outcome)
            as_expected = outcome.way == ways.get(outcome.name, "nothing")
            print(f"{'' if as_expected else '! '}{outcome.way:14}{outcome.seconds:6.1f} s  {outcome.name}")
            print(f"      {outcome.said[:220]}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=1))
    print(collections.Counter(outcome.way for outcome in outcomes))


if __name__ == "__main__":
    main()
