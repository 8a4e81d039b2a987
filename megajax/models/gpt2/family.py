"""GPT-2 as a family of models."""

from megajax.batch import text_form
from megajax.models.family import Family
from megajax.models.gpt2.flops import step_products
from megajax.models.gpt2.model import GPT2

FAMILY = Family(model=GPT2, form=text_form, products=step_products, linear_embedding=True)
