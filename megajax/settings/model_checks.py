"""Check that the options of a model fit each other and its family."""

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.lora_config import LORA_TARGETS, LoraConfig, product_sizes
from megajax.core.models.registry import FAMILIES, GATED
from megajax.core.options import suggest
from megajax.host.paths import apart
from megajax.settings.option_errors import as_flag, check_read


def check_model(model: ModelConfig) -> None:
    """Check that a model's options fit each other and its family."""
    family = FAMILIES[model.family]
    for name, able in (("layer_order", family.layer_orders), ("head", family.heads)):
        if getattr(model, name) not in able:
            flag = as_flag(f"model.{name}", getattr(model, name))
            raise UserError(f"{flag} with --model.family {model.family}; valid: {' or '.join(able)}")
    for name, value in family.fixed.items():
        if getattr(model, name) != value:
            flag = as_flag(f"model.{name}", getattr(model, name))
            raise UserError(f"{flag} with --model.family {model.family}; valid: {as_flag(f'model.{name}', value)}")
    _check_heads(model, free=not family.fixed)
    if family.fixed and model.mlp_size != 4 * model.hidden_size:
        raise UserError(
            f"--model.mlp-size {model.mlp_size} with --model.family {model.family}; valid: {4 * model.hidden_size}, "
            "4 x --model.hidden-size"
        )
    if sum(map(int, model.bf16_layers.split(","))) > model.num_layers:
        raise UserError(
            f"--model.bf16-layers {model.bf16_layers} with --model.num-layers {model.num_layers}; valid: no more layers"
        )
    if model.sequence_length <= model.num_predicting:
        raise UserError(
            f"--model.prediction-modules {model.prediction_modules} with --model.sequence-length "
            f"{model.sequence_length}; valid: less"
        )
    check_read(model, "model")
    _check_rotary(model)
    _check_latent(model)
    _check_linear(model)
    _check_experts(model)


def _check_heads(model: ModelConfig, *, free: bool) -> None:
    """Check numbers and sizes of heads; `free`: the family has no fixed ones."""
    heads, hidden = model.num_heads, model.hidden_size
    if model.head_size == 0 or (not free and model.head_size * heads != hidden):
        below = hidden // heads * heads
        valid = " or ".join(str(size) for size in (below, below + heads) if size)
        size = f" and --model.head-size {model.head_size}" if model.head_size else ""
        raise UserError(
            f"--model.hidden-size {hidden} is not divisible by --model.num-heads {heads}{size}; "
            f"valid: a multiple of {heads}, such as {valid}{', or a --model.head-size' if free else ''}"
        )
    if model.query_key_norm and model.query_key_norm_over == "width" and model.norm == "rmsnorm-1p":
        raise UserError("--model.query-key-norm-over width with --model.norm rmsnorm-1p; valid: head, or another norm")
    if heads % model.num_kv_heads or (not free and heads != model.num_kv_heads):
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0] if free else [str(heads)]
        shown = divisors if len(divisors) < 12 else [*divisors[:5], "…", *divisors[-5:]]
        raise UserError(
            f"--model.num-kv-heads {model.num_kv_heads} with --model.num-heads {heads}; valid: {', '.join(shown)}"
        )


def _check_latent(model: ModelConfig) -> None:
    """Check latent attention, which has positions in a part of each key, and keys and values for every query head."""
    if not model.latent_size:
        return
    reason = f"with --model.latent-size {model.latent_size}"
    fixed = {"bias": "none", "query_key_norm": False, "num_kv_heads": model.num_heads, "attention_sinks": False}
    fixed |= {"attention_gate": "none"} | ({"positions": "rotary"} if model.positions == "learned" else {})
    for name, value in fixed.items():
        if getattr(model, name) != value:
            flag, valid = (as_flag(f"model.{name}", each) for each in (getattr(model, name), value))
            raise UserError(f"{flag} {reason}; valid: {valid}")


def _check_linear(model: ModelConfig) -> None:
    """Check linear attention, which has none of what only softmax attention reads, and heads of values for each of
    keys."""
    if not model.linear_heads:
        return
    heads, layers = (as_flag(f"model.{name}", getattr(model, name)) for name in ("linear_heads", "linear_layers"))
    unread = {"latent_size": 0, "attention_sinks": False, "query_key_norm": False, "attention_gate": "none"}
    for name, value in (unread | {"sliding_window": 0, "prediction_modules": 0}).items() if all(model.linear) else ():
        if getattr(model, name) != value:
            flag, valid = (as_flag(f"model.{name}", each) for each in (getattr(model, name), value))
            raise UserError(f"{flag} with {heads}; valid: {valid}")
    if model.linear_heads % model.linear_key_heads:
        raise UserError(f"--model.linear-key-heads {model.linear_key_heads} with {heads}; valid: a divisor of them")
    if not any(model.linear):
        given = f"{heads} with {layers}, which gives none of --model.num-layers {model.num_layers} linear attention"
        raise UserError(f"{given}; valid: fewer layers before those that have it, or --model.linear-heads 0")
    alike = next((n for n, linear in enumerate(model.linear) if linear != model.linear[0]), model.num_layers)
    if model.dense_layers > alike:
        raise UserError(
            f"--model.dense-layers {model.dense_layers} with {layers}, which makes them differ; valid: at most {alike}"
        )


def _check_experts(model: ModelConfig) -> None:
    if not model.num_experts:
        return
    if not 0 < model.experts_per_token <= model.num_experts:
        raise UserError(
            f"--model.experts-per-token {model.experts_per_token} with --model.num-experts {model.num_experts}; "
            f"valid: 1 to {model.num_experts}"
        )
    _check_groups(model)
    if model.dense_layers >= model.num_layers:
        raise UserError(
            f"--model.dense-layers {model.dense_layers} with --model.num-layers {model.num_layers}, which leaves no "
            f"layer with experts; valid: 0{f' to {model.num_layers - 1}' if model.num_layers > 1 else ''}"
        )


def _check_groups(model: ModelConfig) -> None:
    groups, experts = model.expert_groups, model.num_experts
    fewest = 2 if model.router_scores == "sigmoid" and groups > 1 else 1
    if experts % groups or experts // groups < fewest:
        raise UserError(
            f"--model.expert-groups {groups} with --model.num-experts {experts}; valid: a divisor of it"
            + (", with two experts or more in each group" if fewest > 1 else "")
        )
    least = -(-model.experts_per_token * groups // experts)  # groups that have enough experts
    if not least <= model.chosen_groups <= groups:
        raise UserError(
            f"--model.chosen-groups {model.chosen_groups} with --model.expert-groups {groups} of {experts // groups} "
            f"experts, {model.experts_per_token} for each token; valid: {least} to {groups}"
        )


def _check_rotary(model: ModelConfig) -> None:
    if model.window_rope_theta and not model.rotary:
        raise UserError(
            f"--model.window-rope-theta {model.window_rope_theta:g} with --model.positions {model.positions}; "
            "valid: 0, or --model.positions rotary"
        )
    size, latent = model.rotary_size, model.latent_size
    fits = 0 < size < model.head_size and (not size % 2 if model.rotary else latent > 0)
    if (size or latent) and not fits:
        raise UserError(
            f"--model.rotary-size {size} with --model.latent-size {latent}; valid: "
            f"{'' if latent else '0, or ' if model.rotary else '0, or with --model.positions rotary '}an even size "
            f"from 2 to less than --model.head-size, {model.head_size}"
        )
    if model.rotary and model.head_size % 2 and not size:
        raise UserError(
            f"--model.head-size {model.head_size} with --model.positions rotary, which rotates pairs "
            "of features; valid: an even size"
        )
    if model.rope_scaling == "llama3" and model.rope_low_frequency >= model.rope_high_frequency:
        raise UserError(
            f"--model.rope-low-frequency {model.rope_low_frequency:g} is not below --model.rope-high-frequency "
            f"{model.rope_high_frequency:g}; valid: less"
        )
    if model.rope_scaling == "yarn" and model.rope_beta_slow > model.rope_beta_fast:
        raise UserError(
            f"--model.rope-beta-slow {model.rope_beta_slow:g} is above --model.rope-beta-fast "
            f"{model.rope_beta_fast:g}; valid: no more"
        )
    if model.rope_scaling == "yarn" and model.rope_theta == 1:
        raise UserError("--model.rope-theta 1 with --model.rope-scaling yarn; valid: more than 1")


def check_lora(lora: LoraConfig, model: ModelConfig) -> None:
    """Check that a model can have these adapters."""
    for word in lora.targets:
        if word not in LORA_TARGETS:
            several = apart(word, LORA_TARGETS.__contains__)
            near = suggest(word, LORA_TARGETS, otherwise="")
            hint = several or (near and f" ({near})")
            raise UserError(f"--lora.targets {word!r}; valid: {', '.join(LORA_TARGETS)}{hint}")
    if not lora.rank:
        return
    if not FAMILIES[model.family].continues_text:
        able = " or ".join(name for name, entry in FAMILIES.items() if entry.continues_text)
        given = f"--lora.rank {lora.rank} with --model.family {model.family}"
        raise UserError(f"{given}; valid: --lora.rank 0, or --model.family {able}")
    if "gate" in lora.targets and not model.gated:
        raise UserError(
            f"--lora.targets gate with --model.activation {model.activation}, which has no gate; "
            f"valid: without gate, or --model.activation {' or '.join(GATED)}"
        )
    if not lora.targets:
        raise UserError(f"--lora.targets is empty; valid: {', '.join(LORA_TARGETS)}")
    if model.latent_size and {"key", "value"} & {*lora.targets}:
        raise UserError(
            f"--lora.targets {' '.join(lora.targets)} with --model.latent-size {model.latent_size}, whose keys and "
            "values are one product; valid: attention instead of key or value"
        )
    if not lora.products(model):
        other, there = ("mlp", "experts") if model.num_experts else ("experts", "an MLP")
        raise UserError(
            f"--lora.targets {' '.join(lora.targets)} with a model that has {there} instead of "
            f"{other}; valid: {'attention or experts' if model.num_experts else 'attention or mlp'}"
        )
    sizes = product_sizes(model)
    name, most = min(((name, min(sizes[name])) for name in lora.products(model)), key=lambda pair: pair[1])
    if lora.rank > most:
        raise UserError(
            f"--lora.rank {lora.rank} is more than the product {name} has, of {sizes[name][0]} x {sizes[name][1]}; "
            f"valid: at most {most}"
        )
