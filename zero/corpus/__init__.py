"""From text to batches of token ids: preparing, tokenizers, reading. Needs neither jax nor a configuration."""
