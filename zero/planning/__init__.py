"""`mode=plan`: memory, traffic and time of a step, from the compiler."""
