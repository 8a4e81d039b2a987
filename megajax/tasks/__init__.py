"""What a model is fine-tuned on and scored by: the paper's tasks, their files, samples and figures. No JAX here."""
