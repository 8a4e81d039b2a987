"""All supported transformers classes: chosen by `model_type` in config.json on import, and by the model's options on
export."""

from megajax.convert import bert, deepseek, gpt2, kimi, llama
from megajax.convert.exchange import Exchange
from megajax.convert.settings import Fields
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.settings.option_errors import as_flag

_NULL = {  # fields that every class must leave empty
    **dict.fromkeys(("quantization_config", "compression_config"), "null, with weights in F32, F16 or BF16"),
    "per_layer_config": "null: the same in all layers",
}
EXCHANGES: tuple[Exchange, ...] = (gpt2.EXCHANGE, *llama.EXCHANGES, *deepseek.EXCHANGES, kimi.EXCHANGE, *bert.EXCHANGES)


def exchange_of(fields: Fields) -> Exchange:
    """The exchange for a model's config.json.

    Raises:
        UserError: its `model_type` is not supported, or its weights are quantized.
    """
    by_type = {exchange.model_type: exchange for exchange in EXCHANGES}
    fields.check("model_type", *by_type, missing=None)
    exchange = by_type[fields["model_type"]]
    if exchange.quantized and fields.section("quantization_config").get("quant_method") == exchange.quantized:
        fields.pop("quantization_config")
    for name, valid in _NULL.items():
        if fields.get(name) is not None:
            raise fields.refusal(name, fields[name], valid)
    return exchange


def exchange_for(model: ModelConfig, came_from: str, name: str) -> Exchange:
    """The exchange of a class that can represent a model: the class it `came_from` if possible, otherwise the first.

    Raises:
        UserError: the model of `name` fits no class; the error names options that would fit the nearest one.
    """
    lacks = [(exchange, exchange.lacks(model)) for exchange in EXCHANGES if exchange.family == model.family]
    if not lacks:
        families = ", ".join(dict.fromkeys(exchange.family for exchange in EXCHANGES))
        raise UserError(f"{name} holds a model of the family {model.family}; valid: {families}")
    fitting = [exchange for exchange, lacking in lacks if not lacking]
    if fitting:
        return next((exchange for exchange in fitting if exchange.architecture(model) == came_from), fitting[0])
    nearest = [*min((lacking for _, lacking in lacks), key=len).items()]
    names = [exchange.architecture(model) for exchange, lacking in lacks if [*lacking.items()] == nearest]
    flags = " ".join(as_flag(f"model.{option}", value) for option, value in nearest)
    valid = f"a run with {flags} ({' or '.join(names)})"
    raise UserError(f"{name} holds a model that no transformers class supports; valid: {valid}")
