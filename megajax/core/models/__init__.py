"""The models, in Flax NNX. They know nothing of pipelines, optimizers, data or config files."""
