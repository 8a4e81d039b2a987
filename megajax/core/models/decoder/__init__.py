"""Decoders: language models, which predict the next token. GPT-2 (Radford et al., 2019), Llama, Qwen and Mistral are
configurations of this one family."""
