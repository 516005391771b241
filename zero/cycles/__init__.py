"""Seconds of a compiled program, from the cycles that the compiler for TPU writes into it."""
