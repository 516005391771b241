"""Text to token ids and back: tokenizers, and the templates of conversations."""
