"""The families that are exchanged: by `model.family` on export, by `model_type` of config.json on import."""

from megajax.convert import bert, gpt2
from megajax.convert.exchange import Exchange
from megajax.convert.settings import Fields

EXCHANGES: dict[str, Exchange] = {"decoder": gpt2.EXCHANGE, "bert": bert.EXCHANGE}


def exchange_of(fields: Fields) -> Exchange:
    """The exchange of a model's config.json.

    Raises:
        UserError: its `model_type` is none of ours.
    """
    types = [name for exchange in EXCHANGES.values() for name in exchange.model_types]
    fields.check("model_type", *types, missing=None)
    return next(exchange for exchange in EXCHANGES.values() if fields.get("model_type") in exchange.model_types)
