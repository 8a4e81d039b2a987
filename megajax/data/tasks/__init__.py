"""Fine-tuning tasks: their files, samples and figures. No JAX here."""
