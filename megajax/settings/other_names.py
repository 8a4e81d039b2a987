"""Names of our options in other systems (Megatron-LM, Hugging Face's Trainer, torchtitan, DeepSpeed), and those of
options that we removed."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from megajax.core.options import suggest
from megajax.settings.option_errors import shown

_BATCH = "--train.global-batch, in sequences over all devices; --train.microbatch is a device's"
_ACCUMULATION = "--train.global-batch / (--train.microbatch x --mesh.data), which follows from these"

_OURS = {
    "--mesh.tensor": "tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "--mesh.pipe": "pp pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "--pipeline.layers": "pipeline_model_parallel_layout decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    "--mesh.data": "dp data_parallel data_parallel_size data_parallel_replicate_degree",
    "--mesh.data, with --optimizer.zero 3": "data_parallel_shard_degree",
    "--optimizer.learning-rate": "lr max_lr peak_lr",
    "--optimizer.min-learning-rate": "min_lr lr_min",
    "--optimizer.schedule": "lr_decay_style lr_scheduler lr_scheduler_type",
    "--optimizer.warmup-steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_iters warmup",
    "--optimizer.warmup-fraction": "lr_warmup_fraction warmup_ratio",
    "--optimizer.decay-steps": "lr_decay_iters lr_decay_steps",
    "--optimizer.weight-decay": "wd",
    "--optimizer.clip-norm": "clip_grad max_grad_norm grad_clip gradient_clipping max_norm",
    "--optimizer.beta1": "adam_beta1",
    "--optimizer.beta2": "adam_beta2",
    "--optimizer.epsilon": "adam_eps adam_epsilon eps",
    "--optimizer.name": "optimizer opt_type optim",
    "--optimizer.muon-momentum": "muon_momentum_beta muon_beta",
    "--optimizer.muon-steps": "muon_num_ns_steps ns_steps",
    "--optimizer.muon-scale": "muon_scale_mode",
    "--optimizer.zero": "zero_stage zero use_distributed_optimizer",
    "--optimizer.zero 3, with --mesh.data N for N devices": "fsdp use_fsdp use_megatron_fsdp fully_shard",
    "--optimizer.zero 3 --optimizer.zero-ranks N, the ranks that share shards": "hsdp use_hsdp hybrid_shard "
    "dp_shard_size dp_replicate_size num_distributed_optimizer_instances",
    _BATCH: "batch_size global_batch_size train_batch_size gbs bs",
    "--train.microbatch": "micro_batch_size local_batch_size per_device_train_batch_size mbs",
    _ACCUMULATION: "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches",
    "--train.steps": "max_steps train_iters total_steps num_steps iters iterations max_iters",
    "--train.epochs": "num_train_epochs num_epochs max_epochs",
    "--train.eval-every": "eval_interval eval_steps eval_freq",
    "--train.eval-batches": "eval_iters",
    "--train.log-every": "log_interval logging_steps log_freq",
    "--train.remat": "recompute recompute_granularity recompute_activations gradient_checkpointing "
    "activation_checkpointing",
    "--checkpoint.every": "save_interval save_steps save_every",
    "--checkpoint.keep": "save_total_limit",
    "--model.num-layers": "n_layer n_layers num_hidden_layers layers",
    "--model.hidden-size": "n_embd d_model dim hidden_dim",
    "--model.num-heads": "num_attention_heads n_head n_heads",
    "--model.num-kv-heads": "num_key_value_heads num_query_groups n_kv_heads",
    "--model.mlp-size": "ffn_hidden_size intermediate_size ffn_dim",
    "--model.sequence-length": "seq_length seq_len max_seq_len max_seq_length block_size context_length "
    "max_position_embeddings",
    "--model.vocab-size": "padded_vocab_size n_vocab",
    "--model.dropout": "hidden_dropout attention_dropout",
    "--precision bf16": "bf16 bfloat16",
    "--precision fp16": "fp16 half",
    "--precision fp8": "fp8 fp8_format float8",
    "--precision": "dtype mixed_precision torch_dtype",
    "--run-dir": "output_dir save out_dir save_dir checkpoint_dir log_dir",
    "--resume": "resume_from_checkpoint load",
    "--data.path": "data data_path train_data_path dataset dataset_path train_file",
    "--tokenizer.path": "tokenizer tokenizer_name tokenizer_model tokenizer_path tokenizer_name_or_path",
    "--init, after `megajax convert import-hf`": "model model_name_or_path pretrained hf_model",
    "--track": "wandb report_to use_wandb",
    "--devices": "gpus num_gpus n_gpus world_size",
    "PRESET, the first argument": "config config_file preset",
}
OURS = {theirs: ours for ours, names in _OURS.items() for theirs in names.split()}


class Removed(NamedTuple):
    """An option that is gone. Presets and runs of before may have it with values that mean what is done now."""

    fixed: Any  # what it is fixed to
    same: tuple[Any, ...] = ()  # other values that mean the same
    instead: str = ""  # what to use in its place, if anything


REMOVED = {
    "optimizer.muon_a": Removed(3.4445),
    "optimizer.muon_b": Removed(-4.775),
    "optimizer.muon_c": Removed(2.0315),
    "optimizer.max_skipped": Removed(20),
    "loss_scale.growth": Removed(2.0),
    "loss_scale.growth_every": Removed(1000),
    "loss_scale.backoff": Removed(0.5),
    "loss_scale.floor": Removed(1.0),
    "pipeline.max_deferred": Removed(-1),
    "optimizer.sums_in_products": Removed("false", same=("auto", False)),
    "profile_pipeline": Removed(False, instead="--profile STEPS, which traces some steps of a run"),
}


def means_nothing(key: str, value: object) -> bool:
    """Whether it is a removed option with a value that it is fixed to."""
    return key in REMOVED and value in (REMOVED[key].fixed, *REMOVED[key].same)


def nearest(unknown: str, valid: Collection[str], otherwise: str) -> str:
    """The end of an error message about an unknown flag or key: what a removed one is fixed to, our name for another's,
    or the nearest valid ones, or `otherwise`."""
    name = unknown.lstrip("-").replace("-", "_").lower()
    if removed := REMOVED.get(name.removeprefix("no_")):
        use = f"; valid: {removed.instead}" if removed.instead else ""
        return f"megajax removed it, and it is always {shown(removed.fixed)}{use}"
    ours = OURS.get(name) or OURS.get(name.rpartition(".")[2], "")
    flag = re.split("[ ,]", ours)[0]
    key = flag.removeprefix("--").replace("-", "_")
    if flag == "PRESET":
        ours = ours if "--train.steps" in valid else ""  # only for commands that take a preset
    elif flag not in valid:
        ours = ours.replace(flag, key, 1) if key in valid else ""
    if ours:
        return f"megajax calls it {ours}"
    same = [each for each in valid if re.sub("[._-]", "", each) == re.sub("[._-]", "", unknown)]
    return f"did you mean {same[0]}?" if same else suggest(unknown, valid, otherwise)
