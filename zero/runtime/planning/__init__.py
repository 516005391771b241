"""`mode=plan`: memory, traffic and time of a step, as the compiler sees them."""
