"""The families of models by name, `model.family`. No JAX here: a family is imported when it is asked for."""

FAMILIES = {
    "gpt2": "megajax.models.gpt2.family",
}
"""Name -> the module that has it as `FAMILY` (`models/family.py`)."""
