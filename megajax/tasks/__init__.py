"""The tasks that models are fine-tuned on: their files, samples and figures. No JAX here."""
