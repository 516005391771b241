"""What a compiled step costs a device: bytes, traffic, and seconds from the cycles that the compiler for TPU writes."""
