"""`python tests/mutants/table.py OUTCOMES.json ...` prints the tables of docs/mutants.md from what `try_mutants.py`
kept; of a mutant that was tried several times the last outcome."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from apart import ALIKE, EQUIVALENT, OUTSIDE
from catalogue import PARTS
from mutant import Mutant, Place
from naming import named_rightly
from planting import ROOT, file_of, found
from trial import Outcome


def on(mutant: Mutant) -> str:
    """Mesh and flags."""
    options = dict(mutant.options)
    mesh = "x".join(map(str, options.pop("mesh")))
    return ", ".join([mesh, *(f"{name} {value}" for name, value in options.items())])


def told(place: Place | None) -> str:
    """A place in words."""
    if place is None:
        return ""
    if place.layer is None:
        return f"gradient of {place.site or 'weights'}" if place.site not in ("weights", "loss") else place.site
    where = "the head" if place.layer < 0 else f"layer {place.layer}"
    return f"{place.site} of {where}, {'backward' if place.backward else 'forward'}"


def asked(outcome: Outcome) -> bool:
    """Whether the trial was one that names places."""
    named = outcome.place is not None or outcome.said.startswith("no activation") or outcome.way == "communication"
    return named or bool(outcome.where) if outcome.way == "types" else named


def row(mutant: Mutant, outcome: Outcome) -> str:
    said = outcome.said.split(": ")[0] if outcome.place else outcome.said
    if outcome.way == "types":
        said = f"{outcome.where[0] if outcome.where else ''}: {outcome.said}"
    if not asked(outcome):
        cells = [mutant.name, on(mutant), outcome.way, "", "not asked", f"{outcome.seconds:.0f}"]
        return "| " + " | ".join(cells) + " |"
    named = "exactly"
    if not named_rightly(mutant, outcome, exactly=True):
        word = "layer or site" if named_rightly(mutant, outcome) else "**no**"
        named = f"{word}; " + (told(mutant.place) or "a function of its file")
    cells = [mutant.name, on(mutant), outcome.way, said[:110].replace("|", "/"), named, f"{outcome.seconds:.0f}"]
    return "| " + " | ".join(cells) + " |"


def main(files: list[str]) -> None:
    outcomes = {each["name"]: Outcome(**each) for file in files for each in json.loads(Path(file).read_text())}
    ways, rights = Counter[str](), Counter[tuple]()
    for part, mutants in PARTS.items():
        print(f"\n### {part.capitalize()}\n")
        print("| fault | on | caught by | named | rightly? otherwise where it is | s |")
        print("| --- | --- | --- | --- | --- | --: |")
        for mutant in sorted(mutants, key=lambda mutant: str(file_of(mutant))):
            if mutant.name not in outcomes:
                print(f"| {mutant.name} | {on(mutant)} | not tried | | | |")
                continue
            outcome = outcomes[mutant.name]
            print(row(mutant, outcome))
            ways[outcome.way] += 1
            if asked(outcome):
                exactly, at_all = (named_rightly(mutant, outcome, exactly=each) for each in (True, False))
                rights[outcome.way, "exactly" if exactly else "layer or site" if at_all else "no"] += 1
    for title, several in (("Wrong alike on every mesh", ALIKE), ("Outside the train step", OUTSIDE)):
        print(f"\n### {title}\n\n| fault | file | caught by |\n| --- | --- | --- |")
        for apart in several:
            print(f"| {apart.name} | `{found(apart.old)[0].relative_to(ROOT)}` | `{apart.why}` |")
    print("\n### Equivalent\n\n| change | file | why nothing changes |\n| --- | --- | --- |")
    for apart in EQUIVALENT:
        print(f"| {apart.name} | `{found(apart.old)[0].relative_to(ROOT)}` | {apart.why} |")
    print(f"\n{sum(ways.values())} tried: {dict(ways)}; named: {dict(rights)}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
