"""Sharding of any pytree inside `jax.pmap`: needs only jax and optax, and Flax to lift a Flax module."""
