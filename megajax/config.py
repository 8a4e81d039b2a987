"""The configuration of a run: frozen dataclasses.

A value's key, `train.global_batch`, is the flag `--train.global-batch` (`megajax.flags`). Values come from presets
(`megajax.presets`), are checked by `megajax.validation`.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from megajax.models.config import ModelConfig
from megajax.pipeline.schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the three mesh axes."""

    data: Annotated[int, "groups of devices that train on different rows of the batch"] = 1
    pipe: Annotated[int, "stages that the layers are divided into"] = 1
    tensor: Annotated[int, "devices that each layer is split over"] = 1

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, over all processes."""
        return self.data * self.pipe * self.tensor


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches move through the stages."""

    schedule: Annotated[
        Literal[tuple(sorted(SCHEDULES))],  # type: ignore[valid-type]  # every function there is
        "order of the forwards and backwards",
    ] = "1f1b"
    chunks: Annotated[int, "pieces of the model on every stage; interleaved: 2 or more, others: 1"] = 1
    vocabulary: Annotated[
        Literal["replicated", "split"], "embedding and head on the first and last stage, or split over all stages"
    ] = "replicated"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and batch of the training run."""

    steps: Annotated[int, "step at which training ends"]
    global_batch: Annotated[int, "sequences per step, over all devices"]
    microbatch: Annotated[int, "sequences per device and microbatch"]
    remat: Annotated[
        Literal["none", "selective", "layer", "stage"],
        "what the backward pass recomputes instead of keeping it in memory; selective: what is cheap to compute",
    ] = "none"
    eval_every: Annotated[int, "steps between two validations"] = 100
    eval_batches: Annotated[int, "global batches per validation; 0: the whole split"] = 0
    log_every: Annotated[int, "steps between two printed lines where there is no progress bar"] = 10


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, where its state is kept, and which steps it skips."""

    learning_rate: Annotated[float, "peak, reached at the end of the warm-up"]
    decay_steps: Annotated[int, "step at which the decay reaches the floor, warm-up included; constant: not used"]
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], "way of the learning rate from the peak down to the floor"
    ] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warm-up from 0"] = 0
    min_learning_rate: Annotated[float, "floor, kept after the decay; constant: not used"] = 0.0
    beta1: Annotated[float, "decay of the mean of the gradients"] = 0.9
    beta2: Annotated[float, "decay of the mean of their squares"] = 0.999
    epsilon: Annotated[float, "added to the denominator"] = 1e-8
    weight_decay: Annotated[float, "decoupled; not on LayerNorm and biases"] = 0.01
    clip_norm: Annotated[float, "largest global norm of the gradients"] = 1.0
    zero: Annotated[
        Literal[0, 1, 3],
        "what is split over data: 0 nothing, 1 main weights and moments, 3 also the weights that layers compute with",
    ] = 1
    gradient_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], "gradients are summed in this: fp32 (fp64 with it), or that of --precision"
    ] = "fp32"
    skip_above: Annotated[
        float, "skip a step whose gradient norm is more than this times the median of recent ones; 0: none"
    ] = 0.0
    max_skipped: Annotated[int, "most steps in a row that are skipped; one more ends the run"] = 20


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling of fp16: the scale shrinks when gradients overflow, and grows when they long did not."""

    initial: Annotated[float, "scale at the start"] = 2.0**16
    growth: Annotated[float, "factor of growth"] = 2.0
    growth_every: Annotated[int, "good steps in a row before it grows"] = 1000
    backoff: Annotated[float, "factor after an overflow"] = 0.5
    floor: Annotated[float, "smallest scale"] = 1.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several corpora to train on."""

    path: Annotated[str, "as data.path"]
    weight: Annotated[float, "its samples are in proportion to this"]


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """A corpus to validate on."""

    name: Annotated[str, "what its loss is called"]
    path: Annotated[str, "as data.path"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, or several."""

    path: Annotated[str, "text, JSONL, Parquet, a folder, a prepared prefix, or the word python-stdlib"] = ""
    sources: Annotated[tuple[Source, ...], "several corpora in given shares, instead of data.path"] = ()
    validation_fraction: Annotated[float, "share of the tokens kept for validation, in whole documents"] = 0.03
    validation: Annotated[tuple[ValidationSet, ...], "corpora that are validated on besides, each by itself"] = ()
    reset_attention: Annotated[
        bool, "attention and positions start anew with every document, also where several share a sequence"
    ] = False


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: Annotated[str, "folder with vocab.json and merges.txt; empty: trained on the corpus"] = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: Annotated[int, "steps between two checkpoints; the last step always has one"] = 100
    keep: Annotated[int, "newest checkpoints to keep"] = 3


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The continuation that is printed at the end of training."""

    prompt: Annotated[str, "text to continue"] = ""
    tokens: Annotated[int, "tokens to sample; 0: none"] = 64
    temperature: Annotated[float, "0: always the most probable token"] = 0.8


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes; found by itself under SLURM, Open MPI and Kubernetes."""

    coordinator: Annotated[str, "HOST:PORT of process 0"] = ""
    num_processes: Annotated[int, "processes of the run; 0: not given"] = 0
    process_id: Annotated[int, "number of this process, from 0; -1: not given"] = -1


@dataclass(frozen=True, kw_only=True)
class Config:
    """The run as a whole."""

    seed: Annotated[int, "of weights, dropout, data order and sampling"] = 0
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"], "of the computation; weights are updated in fp32 or better"
    ] = "fp32"
    run_dir: Annotated[str, "where everything is written; empty: runs/PRESET"] = ""
    resume: Annotated[
        Literal["auto", "never", "must"],
        "continue from the last checkpoint: if there is one, never, or fail without one",
    ] = "auto"
    simulate_devices: Annotated[int, "CPU devices to simulate in this process; 0: use the real devices"] = 0
    sequence_parallel: Annotated[
        bool, "split activations between the blocks along the sequence, over tensor (all-gather, reduce-scatter)"
    ] = False
    profile_pipeline: Annotated[bool, "measure the pipeline's stages instead of training"] = False
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = LossScaleConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()

    @property
    def splits_vocabulary(self) -> bool:
        """Whether all stages hold a part of the vocabulary and run embedding and head together."""
        return self.pipeline.vocabulary == "split" and self.mesh.pipe > 1


def to_toml(config: Config) -> str:
    """The configuration as a preset; loading and resolving it gives the identical one."""
    import tomli_w

    return tomli_w.dumps(asdict(config))
