"""What `--bitwise` has been tested with. All else is refused by name."""

from collections.abc import Collection
from operator import attrgetter

from megajax.core.config import LOSSES, StepConfig
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.core.options import counted, options
from megajax.settings.config import Config
from megajax.settings.option_errors import as_flag

_ANY: Collection = ()
_MOST_TERMS = 2**16  # rows times parts: a digit of their sums has at least 14 bits then
_MODEL = (
    "num_layers hidden_size num_heads num_kv_heads head_size mlp_size sequence_length vocab_size vocab_multiple "
    "norm_epsilon positions bias query_key_norm query_key_norm_over attention_sinks tied_embedding scaled_embedding "
    "query_scalar dropout init_std layer_order head num_classes scan_layers rope_theta rope_factor rope_low_frequency "
    "rope_high_frequency rope_original_length sliding_window window_layers window_rope_theta num_experts "
    "experts_per_token expert_size shared_expert_size shared_expert_gate dense_layers expert_capacity "
    "renormalize_shares router_scores expert_groups chosen_groups share_scale balance balance_coefficient "
    "balance_step router_z_loss latent_size query_latent_size rotary_size value_size swiglu_alpha swiglu_limit "
    "linear_heads linear_layers linear_key_heads linear_key_size linear_value_size linear_decay linear_gate "
    "linear_write linear_convolution linear_norm_epsilon linear_chunk"
)
_OPTIMIZER = (
    "learning_rate decay_steps schedule cooldown_steps cooldown_shape warmup_steps warmup_fraction min_learning_rate "
    "beta1 beta2 epsilon weight_decay clip_norm skip_above zero zero_ranks overlap_reductions overlap_gathers "
    "adamw_learning_rate muon_momentum muon_scale muon_steps muon_precision"
)
TESTED: dict[str, Collection] = {
    **dict.fromkeys(("seed", "bitwise", "deterministic", "mesh.data", "mesh.pipe", "mesh.tensor"), _ANY),
    **dict.fromkeys(("pipeline.schedule", "pipeline.chunks", "pipeline.layers", "pipeline.weight_gradients"), _ANY),
    **dict.fromkeys(("train.global_batch", "train.microbatch", "train.remat", "train.freeze"), _ANY),
    **{f"model.{name}": _ANY for name in _MODEL.split()},
    **{f"optimizer.{name}": _ANY for name in _OPTIMIZER.split()},
    **dict.fromkeys(("lora.rank", "lora.alpha", "lora.targets"), _ANY),
    **dict.fromkeys(("loss_scale.initial", "data.reset_attention", "sequence_parallel", "train.metrics"), _ANY),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer.name": ("adamw", "muon"),
    "model.family": ("decoder", "bert"),
    "model.norm": ("layernorm", "rmsnorm", "rmsnorm-1p"),
    "model.activation": ("auto", "gelu", "gelu-tanh", "swiglu", "swiglu-clamped", "geglu-tanh"),
    "model.rope_scaling": ("none", "linear", "llama3"),
    "model.attention_gate": ("none", "sigmoid"),
    "model.attention": ("auto", "blocks"),
}
"""Options of a step with any value, or with those that are named; all others must have their defaults."""


def check_bitwise(config: Config) -> None:
    """Refuse what has not been tested with `--bitwise`."""
    if not config.bitwise:
        return
    tested = TESTED | {"train.loss": [name for name in LOSSES if name != "preferences"]}  # some may be registered
    for key, option in options(StepConfig).items():
        value, valid = attrgetter(key)(config), tested.get(key, (option.default,))
        if valid and value not in valid:
            alone = ", ".join(as_flag(key, each) for each in valid)
            raise UserError(f"{as_flag(key, value)} with --bitwise {config.bitwise}; valid: {alone}, or --bitwise 0")
    model, split = config.model, config.sequence_parallel and config.bitwise > 1
    of_own_tokens = {  # options with weights between regions whose gradients are sums over a device's tokens
        "family": not FAMILIES[model.family].continues_text,
        "num_experts": model.num_experts,
        "latent_size": model.latent_size,
        "linear_decay": model.linear_heads and model.linear_decay == "channel",
    }
    for name in [name for name, has in of_own_tokens.items() if has and split]:
        beside = f"--bitwise {config.bitwise} and {as_flag(f'model.{name}', getattr(model, name))}"
        raise UserError(f"--sequence-parallel with {beside}; valid: --no-sequence-parallel, or --bitwise 0")
    rows = config.train.global_batch * config.bitwise
    if rows > _MOST_TERMS:
        valid = counted(_MOST_TERMS // config.bitwise, "sequence")
        raise UserError(
            f"--train.global-batch {config.train.global_batch} with --bitwise {config.bitwise}; valid: at most {valid}"
        )
