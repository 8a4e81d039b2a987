"""All mutants, by the part of the code that they change."""

from of_collectives import BORDERS, COLLECTIVES, SHARDS
from of_models import LAYERS, RANDOM, VOCABULARY
from of_pipeline import ENDS, EXECUTOR, ROWS, STAGES
from of_program import BIND, STEP

MUTANTS = [
    *COLLECTIVES,
    *BORDERS,
    *SHARDS,
    *LAYERS,
    *RANDOM,
    *VOCABULARY,
    *ENDS,
    *EXECUTOR,
    *ROWS,
    *STAGES,
    *BIND,
    *STEP,
]
