"""All mutants, by the part of the code that they change."""

from of_collectives import BORDERS, COLLECTIVES, SHARDS
from of_models import LAYERS, RANDOM, VOCABULARY
from of_pipeline import ENDS, EXECUTOR, ROWS, STAGES
from of_program import BIND, STEP

PARTS = {
    "COLLECTIVES": COLLECTIVES,
    "BORDERS": BORDERS,
    "SHARDS": SHARDS,
    "LAYERS": LAYERS,
    "RANDOM": RANDOM,
    "VOCABULARY": VOCABULARY,
    "ENDS": ENDS,
    "EXECUTOR": EXECUTOR,
    "ROWS": ROWS,
    "STAGES": STAGES,
    "BIND": BIND,
    "STEP": STEP,
}
MUTANTS = [mutant for mutants in PARTS.values() for mutant in mutants]
